"""``torchrl-ext push``: put a checkpoint into running engines from the shell."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

from rich.text import Text
from typer import Argument, Option, Typer

from torchrl_ext.base.errors import ConfigError, ManifestError, UpdateError
from torchrl_ext.cli.frame import APIKey, answer, fail, note, progress, table

if TYPE_CHECKING:
    from torch import Tensor

    from torchrl_ext.base.types import EngineInfo, Info
    from torchrl_ext.data.weights.checkpoint import CheckpointSource

__all__ = ["app", "check_engines"]

_OPTIONS = {"disk": {"root", "keep_files"}, "collective": {"master_address"}, "native": {"master_address"}}
"""Transport -> the options that mean something with it."""

_BY_FILES, _BY_GROUP = "Transports by files", "Transports by a broadcast"

app = Typer()


@app.command()
def push(
    engines: Annotated[
        list[str], Option(metavar="URL...", help="Address of an engine, not of a router; list several.")
    ],
    directory: Annotated[str, Argument(metavar="DIR", help="Hugging Face checkpoint directory.")],
    transport: Annotated[Literal["disk", "collective", "native"], Option(help="How the weights travel.")] = "disk",
    dtype: Annotated[str | None, Option(help="Cast floating-point tensors, for example to bfloat16.")] = None,
    api_key: APIKey = None,
    timeout_s: Annotated[float, Option(help="Deadline of every step, in seconds.")] = 600.0,
    root: Annotated[
        str | None,
        Option(rich_help_panel=_BY_FILES, help="Directory that engines see under the same path."),
    ] = None,
    keep_files: Annotated[
        bool, Option("--keep-files", rich_help_panel=_BY_FILES, help="Keep the files under the root.")
    ] = False,
    master_address: Annotated[
        str | None, Option(rich_help_panel=_BY_GROUP, help="This host's address, as engines reach it.")
    ] = None,
) -> int:
    """Put the weights of a checkpoint into running engines, as one update of all of them.

    Engines of another model refuse the weights and continue to serve. The exit status is 3 if an engine does not serve
    the weights afterwards.

    Example: `torchrl-ext push checkpoints/step-400 --engines host1:8000 host2:8000 --root /shared/updates`
    """
    import torchrl_ext as tx
    from torchrl_ext.base.types import dtype_from_name

    given: Info = {"root": root, "keep_files": keep_files, "master_address": master_address}
    given = {name: value for name, value in given.items() if value}
    for name in sorted(given.keys() - _OPTIONS[transport]):
        able, option = " or ".join(one for one, names in _OPTIONS.items() if name in names), name.replace("_", "-")
        raise ConfigError(f"--{option} does not go with --transport {transport}", expected=f"--transport {able}")
    if keep_files and not root:
        raise ConfigError("--keep-files needs a place for the files", hint="name it with --root")
    try:
        cast = dtype_from_name(dtype) if dtype else None
    except ManifestError as unknown:
        raise ConfigError(unknown.what) from None
    error: UpdateError | None = None
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(_read(directory))
        found = tx.discover(*engines, api_key=api_key)
        check_engines(found, transport)
        settings = _settings(transport, found, given, stack)
        end = tx.make_transport(transport, timeout_s=timeout_s, **settings)
        fleet = tx.connect(*engines, api_key=api_key, load_timeout_s=timeout_s)
        note(f"{directory} to {len(found)} engine(s) by {transport}")
        try:
            report = stack.enter_context(tx.WeightSender(end, fleet, dtype=cast)).update_weights(source)
        except UpdateError as failure:
            report, error = failure.report, failure
    document = {"pushed": error is None, "directory": directory, "report": report.to_json()}
    rows = table("engine", "kind", "state", "version", "pause", "")
    for row in report.engines:
        state = Text(row.state, "green" if row.state == "serving" and row.error is None else "red")
        version = "" if row.version is None else str(row.version)
        rows.add_row(row.engine, row.kind, state, version, f"{1e3 * row.pause_s:.0f} ms", row.error or "")
    if error is not None:
        return fail(error, rows, **document)
    proof = f", proved: {report.proof}" if report.verified else ""
    took = f"{report.bytes:,} bytes in {report.spans['total']:.2f} s"
    return answer(document, rows, f"version {report.version}: {took}{proof}")


def check_engines(found: Sequence[EngineInfo], transport: str) -> None:
    """Raise ConfigError if an engine cannot follow by ``transport``."""
    for info in found:
        if transport not in info.transports:
            raise ConfigError(
                f"{info.url} cannot follow by {transport!r}",
                expected=f"one of {', '.join(info.transports) or 'no transport: it lacks the plugin'}",
                hint=f"`torchrl-ext doctor {info.url}` reports what is missing",
            )
    kinds = sorted({info.kind for info in found})
    if transport == "native" and len(kinds) > 1:
        raise ConfigError(
            f"engines of {' and '.join(kinds)} share no broadcast of their own",
            hint="push to the engines of each make by themselves, or use --transport disk",
        )


def _settings(transport: str, found: Sequence[EngineInfo], given: Info, stack: contextlib.ExitStack) -> Info:
    """Return the transport's settings; what it writes is removed when ``stack`` closes, unless files are kept."""
    from torchrl_ext.base.types import is_loopback

    if transport in ("collective", "native"):
        make = {"make": found[0].kind} if transport == "native" else {}
        return {"master_address": _own_address(found[0].url), **make, **given}
    if "root" in given:  # a directory of its own, since others may have published versions under the same root
        place = f"{given['root'].rstrip('/')}/push-{uuid.uuid4().hex[:12]}"
        if not given.get("keep_files"):
            stack.callback(shutil.rmtree, place, ignore_errors=True)
    else:
        away = [info.url for info in found if not is_loopback(urlsplit(info.url).hostname or "")]
        if away:
            raise ConfigError(
                f"{away[0]} is on another host, and transport {transport!r} needs files that it sees",
                hint="name a directory that both see with --root, or push with --transport collective",
            )
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="torchrl-ext-push-"))
    return {**given, "root": place}


@contextlib.contextmanager
def _read(directory: str) -> Iterator[CheckpointSource]:
    """Yield the source of a checkpoint; a bar on a terminal shows how much of it was read."""
    from torchrl_ext.data.weights.checkpoint import CheckpointSource

    class Counted(CheckpointSource):
        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in super().__iter__():
                yield name, tensor
                advance(tensor.nbytes)

    source = Counted(directory)
    with progress(f"reading {directory}", sum(meta.nbytes for meta in source.params())) as advance:
        yield source


def _own_address(url: str) -> str:
    """Return this machine's address towards an engine; 127.0.0.1 where the engine's cannot be looked up."""
    parts = urlsplit(url)
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # a datagram socket sends nothing yet
            return str(probe.getsockname()[0])
    return "127.0.0.1"
