"""``torchrl-ext push``: put a checkpoint, or what another process published, into running engines from the shell."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from rich.text import Text
from typer import Argument, Option, Typer

from torchrl_ext.cli.frame import APIKey, answer, fail, note, table
from torchrl_ext.errors import ConfigError, ManifestError, UpdateError, WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor

    from torchrl_ext.rpc.client import EngineClient
    from torchrl_ext.types import EngineInfo, SyncReport
    from torchrl_ext.weights.checkpoint import CheckpointSource

__all__ = ["app"]

_FILES = {"--root", "--keep-files", "--dtype"}
_GROUP = {"--master-address", "--dtype"}
_OPTIONS = {"disk": _FILES, "delta": _FILES | {"--base", "--encoding"}, "collective": _GROUP, "native": _GROUP}
"""Transport -> the options that mean something with it."""

_BY_FILES, _BY_GROUP = "Transports by files", "Transports by a broadcast"

app = Typer()


@app.command()
def push(
    engines: Annotated[
        list[str], Option(metavar="URL...", help="Address of an engine, not of a router; list several.")
    ],
    directory: Annotated[str | None, Argument(metavar="DIR", help="Hugging Face checkpoint directory.")] = None,
    published: Annotated[
        str | None,
        Option(metavar="ROOT", help="Push the newest version under this root, which engines can read, instead of DIR."),
    ] = None,
    transport: Annotated[
        Literal["disk", "delta", "collective", "native"] | None, Option(help="Transport of DIR. Default: disk.")
    ] = None,
    dtype: Annotated[str | None, Option(help="Cast floating-point tensors, for example to bfloat16.")] = None,
    api_key: APIKey = None,
    timeout_s: Annotated[float, Option(help="Deadline of every step, in seconds.")] = 600.0,
    root: Annotated[
        str | None,
        Option(
            rich_help_panel=_BY_FILES,
            help="Directory (with delta also a bucket) that engines can read under the same path.",
        ),
    ] = None,
    keep_files: Annotated[
        bool, Option("--keep-files", rich_help_panel=_BY_FILES, help="Keep the files under the root.")
    ] = False,
    base: Annotated[
        str | None,
        Option(
            metavar="DIR",
            rich_help_panel=_BY_FILES,
            help="Checkpoint that the engines hold: with delta the current one, with --published the one that they "
            "started with.",
        ),
    ] = None,
    encoding: Annotated[
        str | None, Option(rich_help_panel=_BY_FILES, help="Encoding of changes, with delta. Default: auto.")
    ] = None,
    master_address: Annotated[
        str | None, Option(rich_help_panel=_BY_GROUP, help="This host's address, as engines reach it.")
    ] = None,
) -> int:
    """Put the weights of a checkpoint into running engines, as one update of all of them.

    Engines of another model refuse the weights and continue to serve. The exit status is 3 if an engine does not serve
    the weights afterwards.

    Examples:
    * `torchrl-ext push checkpoints/step-400 --engines host1:8000 host2:8000 --root /shared/updates`
    * `torchrl-ext push checkpoints/step-500 --engines host1:8000 --transport delta --base checkpoints/step-400`
    * `torchrl-ext push --published /shared/updates --engines host1:8000 host2:8000`
    """
    import torchrl_ext as tx
    from torchrl_ext.types import dtype_from_name

    if (directory is None) == (published is None):
        raise ConfigError("push takes DIR or --published ROOT", expected="one of the two")
    mode = transport or "disk"
    given = {"--root": root, "--keep-files": keep_files, "--dtype": dtype, "--encoding": encoding, "--base": base}
    given |= {"--master-address": master_address, "--transport": published and transport}
    for option in [option for option, value in given.items() if value]:
        if published and option != "--base":
            raise ConfigError(f"{option} does not go with --published", expected="--base or nothing")
        if not published and option not in _OPTIONS[mode]:
            able = " or ".join(name for name, options in _OPTIONS.items() if option in options)
            raise ConfigError(f"{option} does not go with --transport {mode}", expected=f"--transport {able}")
    if keep_files and not root:
        raise ConfigError("--keep-files needs a place for the files", hint="name it with --root")
    try:
        cast = dtype_from_name(dtype) if dtype else None
    except ManifestError as unknown:
        raise ConfigError(unknown.what) from None
    with contextlib.ExitStack() as stack:
        source = None if directory is None else stack.enter_context(_read(directory))
        found = tx.discover(*engines, api_key=api_key)
        if source is None:
            mode = "delta" if all("delta" in info.transports for info in found) else "disk"
        _check_engines(found, mode)
        if source is not None:
            settings = _settings(mode, found, root, keep_files, base, encoding, master_address, stack)
            end = tx.make_transport(mode, timeout_s=timeout_s, **settings)
            stack.callback(end.shutdown)
        fleet = tx.connect(*engines, api_key=api_key, load_timeout_s=timeout_s)
        stack.callback(fleet.close)
        if source is None:
            report, error = _load_published(str(published), base or _served(found), mode, fleet, stack)
        else:
            note(f"{directory} to {len(found)} engine(s) by {mode}")
            try:
                report, error = tx.WeightSender(end, fleet, dtype=cast).update_weights(source), None
            except UpdateError as failure:
                report, error = failure.report, failure
    document = {"pushed": error is None, "directory": directory or published, "report": report.to_json()}
    rows = table("engine", "kind", "state", "version", "pause", "")
    for row in report.engines:
        colour = "green" if row.state == "serving" and row.error is None else "red"
        version = "" if row.version is None else str(row.version)
        cells = (row.engine, row.kind, Text(row.state, colour), version, f"{1e3 * row.pause_s:.0f} ms")
        rows.add_row(*cells, row.error or "")
    if error is None:
        return answer(document, rows, *_summary(report))
    return fail(error, rows, **document)


def _summary(report: SyncReport) -> Iterator[str]:
    share = f" of {report.model_bytes:,}" if report.bytes != report.model_bytes else ""
    proof = f", proved: {report.proof}" if report.verified else ""
    moved = f": {report.bytes:,}{share} bytes" if report.bytes else ""  # 0: another process has published it
    yield f"version {report.version}{moved} in {report.spans['total']:.2f} s{proof}"
    if report.encoding:
        yield f"coded as {report.encoding}"


def _load_published(
    place: str, base: str | None, transport: str, fleet: EngineClient, stack: contextlib.ExitStack
) -> tuple[SyncReport, UpdateError | None]:
    """Have the engines load the newest published version; return the report, with the error where one does not."""
    from torchrl_ext.sync.published import PublishedFollower
    from torchrl_ext.transports.published import PublishedRoot
    from torchrl_ext.types import ParamMeta, SyncReport

    root = PublishedRoot(place, base, transport=transport)
    stack.callback(root.close)
    newest = root.newest()
    if newest is None:
        raise ConfigError(f"{place} holds no version")
    if transport == "disk" and "path" not in newest:
        raise ConfigError(f"{place} holds no full version", expected="one, as some engines lack our plugin")
    params = [ParamMeta.from_json(row) for row in newest["params"]]
    began, error = time.perf_counter(), None
    try:
        PublishedFollower(root, fleet).take(newest)
    except UpdateError as failure:
        error = failure
    report = SyncReport(
        version=newest["version"],
        transport=transport,
        tensors=len(params),
        model_bytes=sum(meta.nbytes for meta in params),
        spans={"total": time.perf_counter() - began},
        engines=fleet.rows(),
        verified=error is None and "path" in newest and fleet.verifies and fleet.proof != "sent",
        proof=fleet.proof,
    )
    return report, error


def _check_engines(found: list[EngineInfo], transport: str) -> None:
    for info in found:
        if transport not in info.transports:
            raise ConfigError(
                f"{info.url} cannot follow by {transport!r}",
                expected=f"one of {', '.join(info.transports) or 'no transport: it lacks the plugin'}",
                hint=f"`torchrl-ext doctor {info.url}` reports what is missing",
            )
    kinds = sorted({info.kind for info in found})
    if transport == "native" and len(kinds) > 1:
        raise ConfigError(f"engines of {' and '.join(kinds)} share no broadcast of their own", expected="one make")


def _settings(
    transport: str,
    found: list[EngineInfo],
    root: str | None,
    keep_files: bool,
    base: str | None,
    encoding: str | None,
    master_address: str | None,
    stack: contextlib.ExitStack,
) -> dict[str, Any]:
    """Return the transport's settings; what it writes is removed when ``stack`` closes, unless files are kept."""
    from torchrl_ext.cli.doctor.shared import own_address
    from torchrl_ext.types import is_loopback

    if transport in ("collective", "native"):
        make = {"make": found[0].kind} if transport == "native" else {}
        return make | {"master_address": master_address or own_address([info.url for info in found])}
    if root is not None:  # a directory of its own, since others may have published versions under the same root
        place = f"{root.rstrip('/')}/push-{uuid.uuid4().hex[:12]}"
        if not keep_files:
            stack.callback(_remove, place)
    else:
        away = [info.url for info in found if not is_loopback(urlsplit(info.url).hostname or "")]
        if away:
            raise ConfigError(
                f"{away[0]} is on another host, and transport {transport!r} needs files that it sees",
                hint="name a directory that both see with --root, or push with --transport collective",
            )
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="torchrl-ext-push-"))
    if transport == "disk":
        return {"root": place, "keep_files": keep_files}
    base = base or _served(found)  # that engines hold its weights is checked before they pause
    if base is None or not Path(base).is_dir():
        raise ConfigError(
            f"the checkpoint that the engines run is not on this host: {base or 'they name none, or several'}",
            hint="name it with --base, or push in full with --transport disk",
        )
    codec = encoding or "auto"
    return {"root": place, "keep_files": keep_files, "base": base, "encoding": codec, "keyframe_every": 0}


def _remove(place: str) -> None:
    """Remove what this push wrote into its own directory or prefix."""
    from torchrl_ext.stores import open_store

    if "://" not in place:
        shutil.rmtree(place, ignore_errors=True)
        return
    try:
        for name in (store := open_store(place)).list():
            store.delete(name)
    except WeightSyncError as error:
        note(f"torchrl-ext: the files of this push remain in {place}: {error}")


def _served(found: list[EngineInfo]) -> str | None:
    """Return the checkpoint that all engines say they serve, if it is the same one."""
    models = {info.model for info in found}
    return models.pop() if len(models) == 1 else None


@contextlib.contextmanager
def _read(directory: str) -> Iterator[CheckpointSource]:
    """Yield the source of a checkpoint; a bar on a terminal shows how much of it was read."""
    from torchrl_ext.progress import counted, progress
    from torchrl_ext.weights.checkpoint import CheckpointSource

    class Counted(CheckpointSource):
        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return counted(super().__iter__(), lambda pair: pair[1].nbytes, advance)

    source = Counted(directory)
    with progress(f"reading {directory}", sum(meta.nbytes for meta in source.params())) as advance:
        yield source
