"""``torchrl-ext watch TARGET...``: show what engines serve and what is published, as it changes."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from torchrl_ext.cli.chain import Reader
from torchrl_ext.cli.main import add_api_key
from torchrl_ext.errors import ConfigError, WeightSyncError
from torchrl_ext.registry import engines
from torchrl_ext.rpc.discovery import discover
from torchrl_ext.stores import open_store
from torchrl_ext.types import Info

__all__ = ["EngineLook", "Watch", "add_parser", "run"]

_COLOURS = {"serving": "green", "paused": "yellow", "asleep": "yellow", "unreachable": "bold red"}


@dataclass(frozen=True, kw_only=True)
class EngineLook:
    """The state of one engine at one moment.

    Attributes:
        engine: its address.
        kind: as in `EngineInfo`; empty until it answered once.
        state: ``"serving"``, ``"paused"``, ``"asleep"``, ``"unreachable"``; ``"unknown"`` where it cannot say.
        version: label of the weights in service; empty where it does not say.
        lag: versions behind the newest that any target knows; None where the label is no number, or of another run.
        other_run: its version is newer than every one of the roots, so that it has it from somewhere else.
        updates: changes of its version since watching began.
        pause_s: how long its last pause was seen, in seconds; no finer than the interval between two looks.
        error: why it could not be asked.
    """

    engine: str
    kind: str = ""
    state: str = "unreachable"
    version: str = ""
    lag: int | None = None
    other_run: bool = False
    updates: int = 0
    pause_s: float = 0.0
    error: str | None = None


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = subparsers.add_parser(
        "watch",
        help="show versions, bytes, pauses, lag and state of roots and engines, live",
        description="Look at engines and roots again and again: what is published, what each engine serves, how far it "
        "is behind, whether it is paused. Only questions are asked; nothing is changed. Ctrl-C ends it.",
    )
    parser.add_argument(
        "targets",
        nargs="+",
        metavar="TARGET",
        help="host:port or http(s) URL of an engine; or a root: a path with a slash in it, or another URL",
    )
    parser.add_argument("--interval-s", type=float, default=1.0, help="between two looks (default: %(default)s)")
    parser.add_argument("--looks", type=int, metavar="N", help="end after so many; with --json 1 by default")
    parser.add_argument("--versions", type=int, default=8, metavar="N", help="newest ones of each root to show")
    parser.add_argument("--timeout-s", type=float, default=5.0, help="deadline of each question, in seconds")
    add_api_key(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Watch until Ctrl-C, or for ``--looks``; with ``--json`` print one document with the last look.

    Raises:
        ConfigError: an interval or a count is out of range.
    """
    if not 0.05 <= args.interval_s <= 3600 or args.versions < 1 or (args.looks is not None and args.looks < 1):
        raise ConfigError("nothing can be watched so", expected="--interval-s of 0.05 to 3600, and counts from 1")
    watch = Watch(args.targets, api_key=args.api_key, timeout_s=args.timeout_s, versions=args.versions)
    looks = args.looks or (1 if args.json else None)
    with contextlib.closing(watch), contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        if args.json:
            for _ in watch.looks(args.interval_s, looks):
                pass
        else:
            console = Console(soft_wrap=True, highlight=False)
            live = stack.enter_context(Live(console=console, auto_refresh=False)) if console.is_terminal else None
            for engines_, roots in watch.looks(args.interval_s, looks):
                if live is not None:
                    live.update(Group(*_lines(engines_, roots)), refresh=True)
                    continue
                console.print(*_lines(engines_, roots), sep="\n")
                sys.stdout.flush()  # a pipe's reader gets each look when it is made
    if args.json:
        print(json.dumps({"engines": [asdict(one) for one in watch.engines], "roots": watch.roots}))
    return 0


class Watch:
    """Looks at engines and roots again and again, and keeps what it saw last.

    Args:
        targets: engines and roots, as on the command line.
        api_key: sent to engines as a bearer token.
        timeout_s: deadline of each question, in seconds.
        versions: how many of the newest versions of a root are told.

    Attributes:
        engines: one for each engine, in the order given.
        roots: one for each root: ``root``, ``latest``, ``versions`` (as ``chain ls`` tells them) or ``error``.
    """

    def __init__(self, targets: Sequence[str], *, api_key: str | None, timeout_s: float, versions: int) -> None:
        self._settings: dict[str, Any] = {"api_key": api_key, "timeout_s": timeout_s}
        self._versions = versions
        self._places = [target for target in targets if _is_root(target)]
        self.engines = [EngineLook(engine=target) for target in targets if not _is_root(target)]
        self.roots: list[Info] = []
        self._clients: dict[str, Any] = {}
        self._paused_since: dict[str, float] = {}

    def looks(self, interval_s: float, count: int | None) -> Iterator[tuple[list[EngineLook], list[Info]]]:
        """Look every ``interval_s`` seconds, ``count`` times or for ever, and yield `engines` and `roots` each time."""
        pause, seen = threading.Event(), 0
        with ThreadPoolExecutor(min(64, len(self.engines) + len(self._places))) as pool:
            while True:
                began = time.monotonic()
                self.engines = list(pool.map(self._engine, self.engines))
                self.roots = list(pool.map(self._root, self._places))  # later: no engine is ahead of what it reads
                self._count_lag()
                yield self.engines, self.roots
                seen += 1
                if seen == count:
                    return
                pause.wait(max(0.0, interval_s - (time.monotonic() - began)))

    def close(self) -> None:
        """Close the connections to engines."""
        for client in self._clients.values():
            client.close()

    def _root(self, root: str) -> Info:
        try:
            reader = Reader(open_store(root), None)
            if not reader.store.available():
                raise ConfigError("there is nothing here yet")
            rows = [reader.summary(number) for number in reader.chain.numbers()[-self._versions :]]
            return {"root": root, "latest": reader.chain.latest(), "versions": rows}
        except FileNotFoundError:
            return {"root": root, "error": "a version went away while it was read"}
        except (WeightSyncError, OSError) as error:
            return {"root": root, "error": error.what if isinstance(error, WeightSyncError) else str(error)}

    def _engine(self, before: EngineLook) -> EngineLook:
        url = before.engine
        try:
            if url not in self._clients:
                (found,) = discover(url, **self._settings)
                self._clients[url] = engines.make(found.kind, url=found.url, **self._settings)
            info, rest = self._clients[url].info(), self._clients[url].state()
        except WeightSyncError as error:
            self._clients.pop(url, None)
            return replace(before, state="unreachable", error=error.what)
        state = (
            "asleep" if rest.asleep else "unknown" if rest.paused is None else "paused" if rest.paused else "serving"
        )
        now, pause_s = time.monotonic(), before.pause_s
        if state == "paused":
            pause_s = now - self._paused_since.setdefault(url, now)
        else:
            self._paused_since.pop(url, None)
        return replace(
            before,
            kind=info.kind,
            state=state,
            version=info.weight_version,
            updates=before.updates + (before.kind != "" and info.weight_version != before.version),
            pause_s=pause_s,
            error=None,
        )

    def _count_lag(self) -> None:
        published = max((root["latest"] for root in self.roots if "latest" in root), default=None)
        served = [int(one.version) for one in self.engines if one.version.isdecimal()]
        newest = max(served, default=0) if published is None else published
        self.engines = [
            replace(one, lag=lag if lag is not None and lag >= 0 else None, other_run=lag is not None and lag < 0)
            for one in self.engines
            for lag in (newest - int(one.version) if one.version.isdecimal() else None,)
        ]


def _is_root(target: str) -> bool:
    scheme, separator, _ = target.partition("://")
    return scheme not in ("http", "https") if separator else "/" in target


def _lines(looks: Sequence[EngineLook], roots: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    """Yield a line per engine, root and version; none is cut, so that addresses and paths stay whole."""
    width = max((len(one.engine) for one in looks), default=0)
    for one in looks:
        behind = "other run" if one.other_run else "" if one.lag is None else f"behind {one.lag}"
        pause = f"last pause {one.pause_s:.1f} s" if one.pause_s else ""
        version = f"version {one.version}" if one.version else ""
        words = (one.kind, version, behind, f"{one.updates} updates", pause, one.error)
        state = (f"{one.state:<12}", _COLOURS.get(one.state, "yellow"))
        yield Text.assemble(f"{one.engine:<{width}}  ", state, "  ".join(filter(None, words)))
    for root in roots:
        yield Text.assemble((root["root"], "bold"), (f"  {root['error']}" if "error" in root else "", "bold red"))
        for row in reversed(root.get("versions", ())):
            density = "" if row["density"] is None else f"density {row['density']:.3%}"
            sizes = [
                f"{what} {row[name]:,} bytes" if row[name] else ""
                for what, name in (("delta", "bytes"), ("full", "keyframe_bytes"))
            ]
            words = (f"version {row['version']}", row["kind"], *sizes, density)
            yield Text("  " + "  ".join(filter(None, words)))
