"""``torchrl-ext doctor URL...``: find problems that would make an update fail."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.text import Text

from torchrl_ext.base.errors import ConfigError, WeightSyncError
from torchrl_ext.cli.frame import APIKey, answer

if TYPE_CHECKING:
    from torchrl_ext.cli.examination import Finding

__all__ = ["app"]

_COLOURS = {"ok": "green", "warning": "yellow", "failure": "bold red"}

app = typer.Typer()


@app.command(context_settings={"ignore_unknown_options": True})
def doctor(
    engines: Annotated[
        list[str] | None, typer.Argument(metavar="URL...", help="Engines; the options of slime and vime go here, too.")
    ] = None,
    transport: Annotated[str | None, typer.Option(help="The job's transport. Default: as its options say.")] = None,
    root: Annotated[str | None, typer.Option(help="Directory or bucket that trainer and engines must see.")] = None,
    model: Annotated[str | None, typer.Option(metavar="DIR", help="Checkpoint that training starts from.")] = None,
    api_key: APIKey = None,
    timeout_s: Annotated[float, typer.Option(help="Deadline of each engine's discovery, in seconds.")] = 10.0,
) -> int:
    """Find problems that would make an update fail.

    Checks the engines, the options of the job (--update-weight-mode and all other options of slime and vime, under
    their names), and the directory that trainer and engines share. Engines continue to generate. The exit status is 1
    if an update would fail.

    Examples:
    * `torchrl-ext doctor host1:8000 host2:8000 --transport delta --root /shared/updates --model policy`
    * `torchrl-ext doctor host1:8000 --update-weight-mode delta --update-weight-disk-dir /shared`
    """
    from torchrl_ext.base.messages import Inspect
    from torchrl_ext.cli import examination as of

    own: list[Finding] = []
    job = _job(engines or [])
    addresses = [*job.addresses, *(job.rollout_external_engine_addrs or ())]
    try:
        chosen = _chosen(job, addresses, api_key, timeout_s)
    except ConfigError as error:
        own.append(of.failed("options", error))
    else:
        if chosen is not None:
            transport, root = transport or chosen[0], root or chosen[1]
            own.append(of.ok("options", f"the options give transport {chosen[0]!r}"))
    dtypes: Sequence[str] = ()
    if model is not None:
        try:
            dtypes = of.dtypes_of(model)
            own.append(of.ok("model", f"{model} holds {', '.join(dtypes)}"))
        except WeightSyncError as error:
            own.append(of.failed("model", error))
    if not (addresses or own):
        raise ConfigError("there is nothing to examine", expected="addresses of engines", hint="torchrl-ext doctor URL")
    with ExitStack() as ends:
        question = Inspect()
        if root is not None and addresses:
            try:
                question = Inspect(root=of.probe(root, ends))
                own.append(of.ok("shared root", f"the trainer can write to {root}"))
            except (WeightSyncError, OSError) as error:
                remedy = "pick another root, or change its permissions"
                own.append(of.failure("shared root", str(error), "a root that the trainer can write to", remedy))
        trainer = of.Trainer(transport, root, model, dtypes, question, api_key, timeout_s)
        with ThreadPoolExecutor(min(64, len(addresses)) or 1) as pool:
            every = list(pool.map(partial(of.examine, trainer), addresses))
    findings = [replace(finding, where="trainer") for finding in own]
    for address, (_, found) in zip(addresses, every, strict=True):
        findings += [replace(finding, where=address) for finding in found]
    failures, warnings = (sum(finding.level == level for finding in findings) for level in ("failure", "warning"))
    document = {
        "ok": not failures,
        "engines": [asdict(info) for info, _ in every if info is not None],
        "findings": [asdict(finding) for finding in findings],
    }
    verdict = Text(f"an update would fail: {failures} failure(s)", "bold red")
    if not failures:
        verdict = Text("no problem found: an update should succeed", "green")
    verdict.append(f", {warnings} warning(s)")
    return answer(document, *map(_shown, findings), verdict, status=1 if failures else 0)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise typer.BadParameter(message)


def _job(words: Sequence[str]) -> argparse.Namespace:
    """Parse addresses and the job's options."""
    from torchrl_ext.compat.flags.options import WeightUpdateConfig

    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("addresses", nargs="*")
    WeightUpdateConfig.add_arguments(parser)
    return parser.parse_intermixed_args(words)


def _chosen(
    job: argparse.Namespace, addresses: Sequence[str], api_key: str | None, timeout_s: float
) -> tuple[str, str | None] | None:
    """Return the transport and the root that the job's options give; None without options.

    Raises:
        ConfigError: the options cannot work together, or the engines have no broadcast in common.
    """
    from torchrl_ext.compat.flags.options import WeightUpdateConfig
    from torchrl_ext.control.discovery import discover

    if all(getattr(job, option.name) in (None, False) for option in fields(WeightUpdateConfig)):
        return None
    config = WeightUpdateConfig.from_arguments(job)
    name = config.transport_config().name
    if name == "collective" and addresses:  # engines without our plugin follow by another transport
        try:
            infos = discover(*addresses, api_key=api_key, timeout_s=timeout_s)
        except WeightSyncError:
            pass  # the examination says why
        else:
            name = config.transport_config(infos).name
    return name, config.update_weight_disk_dir


def _shown(finding: Finding) -> Text:
    """Return a finding as lines, none of which is cut."""
    rows = [f"{finding.where}  {finding.check}: {finding.found}"]
    rows += [f"{name}: {text}" for name, text in (("expected", finding.expected), ("remedy", finding.remedy)) if text]
    return Text.assemble((f"{finding.level:<9}", _COLOURS[finding.level]), f"\n{' ' * 9}".join(rows))
