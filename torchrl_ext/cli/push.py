"""``torchrl-ext push DIR --engines URL...``: put a checkpoint into running engines from the shell.

``torchrl-ext push --published ROOT --engines URL...`` has them load the newest version that another process published.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, final
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from torchrl_ext.cli.main import add_api_key
from torchrl_ext.errors import ConfigError, UpdateError, WeightSyncError
from torchrl_ext.stores import open_store
from torchrl_ext.types import EngineInfo, ParamMeta, SyncReport, dtype_from_name, is_loopback
from torchrl_ext.weights.source import WeightSource

__all__ = ["add_parser", "run"]

TRANSPORTS = ("disk", "delta", "collective", "native")
_BROADCASTS = ("collective", "native")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = subparsers.add_parser(
        "push",
        help="put a checkpoint into running engines",
        description="Put the weights of a checkpoint directory into running engines, as one update of all of them, or "
        "the newest version of a root that a trainer publishes into. Those of another model are refused while they "
        "serve.",
    )
    parser.add_argument("directory", nargs="?", metavar="DIR", help="Hugging Face checkpoint directory")
    parser.add_argument("--published", metavar="ROOT", help="in its place: a root with versions, which engines see too")
    parser.add_argument("--engines", nargs="+", required=True, metavar="URL", help="engines, not routers")
    parser.add_argument("--transport", choices=TRANSPORTS, help="default: disk")
    parser.add_argument("--root", help="directory (delta: or bucket) that the engines see under the same path")
    parser.add_argument(
        "--base",
        metavar="DIR",
        help="delta: the checkpoint that the engines run now; published: the one that they were started with",
    )
    parser.add_argument("--encoding", default="auto", help="delta: how changes are coded (default: %(default)s)")
    parser.add_argument("--keep-files", action="store_true", help="leave what was published under the root")
    parser.add_argument("--dtype", help="cast floating-point tensors on the way, for example bfloat16")
    parser.add_argument("--master-address", help="collective, native: this host's address, as the engines reach it")
    add_api_key(parser)
    parser.add_argument("--timeout-s", type=float, default=600.0, help="deadline of every step, in seconds")
    return parser


def run(args: argparse.Namespace) -> int:
    """Push the checkpoint, and print a row per engine.

    Returns:
        0; 1 when not every engine serves the checkpoint.

    Raises:
        WeightSyncError: nothing was begun: no checkpoint, no engine, a transport or settings that cannot work.
    """
    import torchrl_ext as tx
    from torchrl_ext.weights.checkpoint import CheckpointSource

    _check(args)
    if args.published is not None:
        return _hand_on(args)
    source = CheckpointSource(args.directory)
    total = sum(meta.nbytes for meta in source.params())
    found = tx.discover(*args.engines, api_key=args.api_key)
    _check_engines(args, found)
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(_Bar(total))
        transport = tx.make_transport(args.transport, **_settings(args, found, stack))
        stack.callback(transport.shutdown)
        fleet = tx.connect(*args.engines, api_key=args.api_key, load_timeout_s=args.timeout_s)
        sender = tx.WeightSender(transport, fleet, dtype=args.dtype)
        stack.callback(fleet.close)
        bar.say(f"{args.directory} to {len(found)} engine(s) by {args.transport}")
        try:
            report, error = sender.update_weights(_Counted(source, bar.advance)), None
        except UpdateError as failure:
            report, error = failure.report, failure
    _tell(args, report, error)
    return 0 if error is None else 1


def _hand_on(args: argparse.Namespace) -> int:
    """Have the engines load the newest published version; see `run`."""
    import torchrl_ext as tx
    from torchrl_ext.sync.published import PublishedFollower
    from torchrl_ext.transports.published import PublishedRoot

    found = tx.discover(*args.engines, api_key=args.api_key)
    with contextlib.ExitStack() as stack:
        args.transport = "delta" if all("delta" in info.transports for info in found) else "disk"
        _check_engines(args, found)
        served = sorted({info.model for info in found})
        base = args.base or (served[0] if len(served) == 1 else None)
        root = PublishedRoot(args.published, base, transport=args.transport)
        stack.callback(root.close)
        info = root.newest()
        if info is None:
            raise ConfigError(f"{args.published} holds no version")
        if args.transport == "disk" and "path" not in info:
            raise ConfigError(
                f"{args.published} holds no full version", expected="one, as some engines lack our plugin"
            )
        fleet = tx.connect(*args.engines, api_key=args.api_key, load_timeout_s=args.timeout_s)
        stack.callback(fleet.close)
        params = [ParamMeta.from_json(row) for row in info["params"]]
        size, began, error = sum(meta.nbytes for meta in params), time.perf_counter(), None
        try:
            PublishedFollower(root, fleet).take(info)
        except UpdateError as failure:
            error = failure
        report = SyncReport(
            version=info["version"],
            transport=args.transport,
            tensors=len(params),
            model_bytes=size,
            spans={"total": time.perf_counter() - began},
            engines=fleet.rows(),
            verified=error is None and "path" in info and fleet.verifies and fleet.proof != "sent",
            proof=fleet.proof,
        )
    _tell(args, report, error)
    return 0 if error is None else 1


def _check(args: argparse.Namespace) -> None:
    if (args.directory is None) == (args.published is None):
        raise ConfigError("there is nothing to push, or too much", expected="a checkpoint directory, or --published")
    if args.published is not None:
        if any((args.transport, args.root, args.keep_files, args.dtype, args.master_address, args.encoding != "auto")):
            raise ConfigError("what is published is loaded as it is", expected="--published with --base alone")
        return
    args.dtype = dtype_from_name(args.dtype) if args.dtype else None
    args.transport = args.transport or "disk"
    if args.transport != "delta" and (args.base or args.encoding != "auto"):
        given = "--base" if args.base else "--encoding"
        raise ConfigError(f"{given} means nothing with transport {args.transport!r}", expected="--transport delta")
    if args.transport in _BROADCASTS and (args.root or args.keep_files):
        raise ConfigError("a broadcast writes no files", expected="no --root and no --keep-files")
    if args.keep_files and not args.root:
        raise ConfigError("--keep-files needs a place for them", hint="name it with --root")


def _check_engines(args: argparse.Namespace, found: list[EngineInfo]) -> None:
    for info in found:
        if args.transport not in info.transports:
            raise ConfigError(
                f"{info.url} cannot follow by {args.transport!r}",
                expected=f"one of {', '.join(info.transports) or 'no transport: it lacks the plugin'}",
                hint=f"`torchrl-ext doctor {info.url}` says what is missing",
            )
    kinds = sorted({info.kind for info in found})
    if args.transport == "native" and len(kinds) > 1:
        raise ConfigError(f"engines of {' and '.join(kinds)} share no broadcast of their own", expected="one make")


def _settings(args: argparse.Namespace, found: list[EngineInfo], stack: contextlib.ExitStack) -> dict[str, Any]:
    from torchrl_ext.cli.doctor.shared import own_address

    shared = {"timeout_s": args.timeout_s}
    if args.transport in _BROADCASTS:
        make = {"make": found[0].kind} if args.transport == "native" else {}
        return shared | make | {"master_address": args.master_address or own_address([info.url for info in found])}
    shared |= {"root": _root(args, found, stack), "keep_files": args.keep_files}
    if args.transport == "disk":
        return shared
    return shared | {"encoding": args.encoding, "base": args.base or _served(found), "keyframe_every": 0}


def _root(args: argparse.Namespace, found: list[EngineInfo], stack: contextlib.ExitStack) -> str:
    """Return a directory for this push alone, since others may have published versions under the same root."""
    if args.root is None:
        away = [info.url for info in found if not is_loopback(urlsplit(info.url).hostname or "")]
        if away:
            raise ConfigError(
                f"{away[0]} is on another host, and transport {args.transport!r} needs files that it sees",
                hint="name a directory that both see with --root, or push with --transport collective",
            )
        return stack.enter_context(tempfile.TemporaryDirectory(prefix="torchrl-ext-push-"))
    place = f"{args.root.rstrip('/')}/push-{uuid.uuid4().hex[:12]}"
    if not args.keep_files:
        stack.callback(_remove, place)
    return place


def _remove(place: str) -> None:
    """Remove what this push put into a place of its own."""
    if "://" not in place:
        shutil.rmtree(place, ignore_errors=True)
        return
    try:
        for name in (store := open_store(place)).list():
            store.delete(name)
    except WeightSyncError as error:
        print(f"torchrl-ext push: files of this push are left in {place}: {error}", file=sys.stderr)


def _served(found: list[EngineInfo]) -> str:
    """Return the checkpoint that engines say they serve; that they hold its weights is checked before they pause."""
    models = sorted({info.model for info in found})
    if len(models) != 1 or not Path(models[0]).is_dir():
        raise ConfigError(
            f"what the engines run is not to be seen from here: {', '.join(models) or 'they do not say'}",
            expected="one checkpoint directory on this host",
            hint="name it with --base, or push in full with --transport disk",
        )
    return models[0]


@final
class _Counted(WeightSource):
    """Reads another source, and reports the bytes of each tensor that was read."""

    def __init__(self, source: WeightSource, advance: Callable[[int], None]) -> None:
        self._source, self._advance = source, advance

    def params(self) -> tuple[ParamMeta, ...]:
        return self._source.params()

    def files(self) -> Mapping[str, bytes]:
        return self._source.files()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._source:
            yield name, tensor
            self._advance(tensor.nbytes)


class _Bar:
    """Shows progress on standard error: a bar in a terminal, lines elsewhere."""

    def __init__(self, total: int) -> None:
        self._console, self._total, self._seen = Console(stderr=True), total, 0
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._task = self._bar.add_task("asking engines", total=total)

    def __enter__(self) -> _Bar:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    def say(self, what: str) -> None:
        """Show what goes on now."""
        self._bar.update(self._task, description=what)
        if not self._console.is_terminal:
            print(what, file=sys.stderr, flush=True)

    def advance(self, count: int) -> None:
        """Count ``count`` more bytes that were read."""
        self._seen += count
        self._bar.update(self._task, completed=self._seen)
        if self._seen == self._total:
            self.say("all read; the engines take it in")


def _tell(args: argparse.Namespace, report: SyncReport, error: UpdateError | None) -> None:
    if args.json:
        told = {"pushed": error is None, "directory": args.directory or args.published, "report": report.to_json()}
        print(json.dumps(told if error is None else told | {"error": str(error), "type": type(error).__name__}))
    else:
        console = Console()
        table = Table("engine", "kind", "state", "version", "pause", "", show_lines=error is not None)
        for row in report.engines:
            colour = "green" if row.state == "serving" and row.error is None else "red"
            version = "" if row.version is None else str(row.version)
            cells = [row.engine, row.kind, f"[{colour}]{row.state}[/]", version, f"{1e3 * row.pause_s:.0f} ms"]
            table.add_row(*cells, row.error or "")
        console.print(table)
    if error is not None:
        print(f"torchrl-ext push: {error}", file=sys.stderr)
    elif not args.json:
        share = f" of {report.model_bytes:,}" if report.bytes != report.model_bytes else ""
        proof = f", proved: {report.proof}" if report.verified else ""
        moved = f": {report.bytes:,}{share} bytes" if report.bytes else ""  # 0: another process has published it
        print(f"version {report.version}{moved} in {report.spans['total']:.2f} s{proof}")
        if report.encoding:
            print(f"coded as {report.encoding}")
