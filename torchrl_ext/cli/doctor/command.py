"""``torchrl-ext doctor URL...``: find what would go wrong in an update before one is tried."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from torchrl_ext import registry
from torchrl_ext.cli.doctor.engines import compare, examine
from torchrl_ext.cli.doctor.findings import Examination, Examined, Finding, Notes
from torchrl_ext.cli.doctor.shared import SharedChecks, compare_checkpoint, compare_own_checkpoint, read_checkpoint
from torchrl_ext.cli.main import add_api_key
from torchrl_ext.errors import ConfigError, WeightSyncError
from torchrl_ext.rpc.discovery import discover
from torchrl_ext.types import PROOFS, EngineInfo, Info

__all__ = ["add_parser", "run"]

_BACK = "every layer as a cold start makes it"
_COLOURS = {"ok": "green", "warning": "yellow", "failure": "bold red"}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the command; the options of the training job can be given word for word."""
    from torchrl_ext import WeightUpdateConfig

    parser = subparsers.add_parser(
        "doctor",
        help="find what will go wrong in an update before it does",
        description="Look at engines, at the options of the job, and at what both sides share. Nothing is changed, and "
        "engines go on generating, but for --rehearse. Exit status 1 when an update would fail.",
    )
    parser.add_argument("addresses", nargs="*", metavar="URL", help="host:port or URL of an engine")
    parser.add_argument("--transport", help="the transport to be used; derived from the options where they are given")
    parser.add_argument("--root", help="directory or bucket that both sides are to see")
    parser.add_argument("--model", metavar="DIR", help="checkpoint directory that training starts from")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="pause each engine that still holds the weights it was started with, load them perturbed and as they are, "
        "and see whether everything that it computes with comes back",
    )
    parser.add_argument("--problems", action="store_true", help="show failures and warnings only")
    add_api_key(parser)
    parser.add_argument("--timeout-s", type=float, default=10.0, help="deadline of each engine's discovery, in seconds")
    WeightUpdateConfig.add_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Examine everything, and print what was found, or with ``--json`` every finding.

    Returns:
        0; 1 when an update would fail.

    Raises:
        ConfigError: there is nothing to look at.
    """
    trainer = Notes("trainer")
    addresses, transport, root = _options(args, trainer)
    if not addresses and not trainer.rows:
        raise ConfigError("there is nothing to look at", expected="addresses of engines", hint="torchrl-ext doctor URL")
    every = _look(args, addresses, transport, root, trainer) if addresses else []
    findings = [*trainer.rows, *(row for one in every for row in one.notes.rows), *(compare(every) if every else ())]
    for one in every if args.rehearse else ():
        findings += _rehearsed(one, args.api_key)
    sick = [one for one in findings if one.level == "failure"]
    if args.json:
        rows = [asdict(one.info) for one in every if one.info is not None]
        print(json.dumps({"ok": not sick, "engines": rows, "findings": [asdict(one) for one in findings]}))
    else:
        _show(findings, problems=args.problems)
    return 1 if sick else 0


def _options(args: argparse.Namespace, notes: Notes) -> tuple[list[str], str | None, str | None]:
    """Return addresses, transport and root, however they were given, and note which transport the options give."""
    from torchrl_ext import WeightUpdateConfig

    names = [option.name for option in dataclasses.fields(WeightUpdateConfig)]
    addresses = [*args.addresses, *(args.rollout_external_engine_addrs or ())]
    transport, root = args.transport, args.root or args.update_weight_disk_dir
    if any(getattr(args, name) not in (None, False) for name in names):
        try:
            config = WeightUpdateConfig.from_arguments(args)
            root = root or config.update_weight_disk_dir  # by whichever of its names
            named = config.transport_config().name
            if transport is None and named == "collective":  # another wire, where engines lack our plugin
                named = config.transport_config(_found(args, addresses)).name
        except ConfigError as error:
            notes.error("options", error)
        else:
            transport = transport or named
            how = f"{config.update_weight_mode} over {config.update_weight_transport}"
            notes.ok("options", f"{how}: transport {transport!r}")
    return addresses, transport, root


def _found(args: argparse.Namespace, addresses: list[str]) -> list[EngineInfo]:
    """Return what engines say of themselves; of those that cannot say it, the examination tells why."""

    def ask(address: str) -> list[EngineInfo]:
        try:
            return discover(address, api_key=args.api_key, timeout_s=args.timeout_s)
        except WeightSyncError:
            return []

    with ThreadPoolExecutor(min(64, len(addresses) or 1)) as pool:
        return [info for found in pool.map(ask, addresses) for info in found]


def _look(
    args: argparse.Namespace, addresses: list[str], transport: str | None, root: str | None, trainer: Notes
) -> list[Examined]:
    size, dtype = read_checkpoint(args.model, trainer) if args.model else (0, "")
    shared = SharedChecks(root, transport, size, trainer)
    with shared.asking(addresses) as question, ThreadPoolExecutor(min(64, len(addresses))) as pool:
        asked = Examination(api_key=args.api_key, timeout_s=args.timeout_s, transport=transport, question=question)
        every = list(pool.map(lambda address: examine(address, asked), addresses))
        for one in every:
            shared.judge(one)
            _tidy(shared, one, args.api_key)
            if dtype:
                compare_checkpoint(args.model, dtype, one)
            elif not args.model:
                compare_own_checkpoint(one)
    return every


def _rehearsed(one: Examined, api_key: str | None) -> Iterator[Finding]:
    """Rehearse one engine, and yield a finding for each of its workers.

    Args:
        one: the engine as it was examined; nothing is yielded where it could not be reached.
        api_key: sent as a bearer token.
    """
    if (
        one.info is None or not one.info.transports or (one.info.stock and one.info.kind != "embedded")
    ):  # other findings say what is missing there
        return
    client = registry.engines.make(one.info.kind, url=one.info.url, api_key=api_key)
    try:
        client.info()
        client.rehearse("once")
    except WeightSyncError as error:
        notes = Notes(one.address)
        notes.failure("rehearsal", f"{error.what}. State: {error.state or 'unknown'}", _BACK, error.hint or "")
        yield from notes.rows
        return
    finally:
        client.close()
    every: tuple[Info, ...] = client.rehearsed or ({},)
    for told in every:
        notes = Notes(f"{one.address} worker {told['worker']}" if told.get("worker") else one.address)
        if client.proof == PROOFS[0]:
            notes.warning("rehearsal", _verdicts(told), _BACK, str(told.get("why", "")))
        else:
            notes.ok("rehearsal", _verdicts(told))
        yield from notes.rows


def _verdicts(told: Info) -> str:
    rows = [
        f"{row['layers']} {row['kernel']} {row['verdict']}" + (f" ({row['why']})" if row["why"] else "")
        for row in told.get("layers", ())
    ]
    return f"proof {told.get('proof', PROOFS[0])!r}; " + ("; ".join(rows) if rows else "nothing was rehearsed")


def _tidy(shared: SharedChecks, one: Examined, api_key: str | None) -> None:
    """Make an engine remove the probes that it wrote."""
    for asked in filter(None, map(shared.forget, one.answers)):
        if one.info is not None:
            with contextlib.suppress(WeightSyncError):  # a hidden file of a few bytes stays; the next trainer sweeps it
                registry.engines.make(one.info.kind, url=one.info.url, api_key=api_key).inspect(asked)


def _show(findings: list[Finding], *, problems: bool) -> None:
    """Print each finding as lines that are never cut: addresses and paths stay whole, in a pipe as well."""
    console = Console(soft_wrap=True, highlight=False)
    for one in findings:
        if problems and one.level == "ok":
            continue
        level = Text(f"{one.level:<8}", _COLOURS[one.level])
        console.print(Text.assemble(level, f" {one.where}  ", (one.check, "bold"), f": {one.found}"))
        for name, words in (("expected", one.expected), ("remedy", one.remedy)):
            if words:
                console.print(Text(f"         {name}: {words}"))
    counts = {level: sum(one.level == level for one in findings) for level in _COLOURS}
    if counts["failure"]:
        console.print(
            f"[bold red]an update would fail[/]: {counts['failure']} failure(s), {counts['warning']} warning(s)"
        )
    else:
        console.print(f"[green]nothing stands in the way of an update[/]; {counts['warning']} warning(s)")
