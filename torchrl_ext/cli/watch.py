"""``torchrl-ext watch TARGET...``: show what engines serve and what is published, as it changes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from typer import Argument, Option, Typer

from torchrl_ext.cli.chain import VERSION_HEAD, version_line
from torchrl_ext.cli.frame import APIKey, answer, as_json
from torchrl_ext.errors import ConfigError, WeightSyncError

__all__ = ["EngineLook", "Watch", "app"]

_STATES = {None: "unknown", True: "paused", False: "serving"}
_COLOURS = {"serving": "green", "paused": "yellow", "asleep": "yellow", "unreachable": "bold red"}


@dataclass(frozen=True, kw_only=True)
class EngineLook:
    """The state of one engine at one moment.

    Attributes:
        engine: its address.
        kind: as in `EngineInfo`; empty until it answered once.
        state: ``"serving"``, ``"paused"``, ``"asleep"``, ``"unreachable"``; ``"unknown"`` where it cannot say.
        version: label of the weights in service; empty where it does not say.
        lag: versions behind the newest that any target knows; None where the label is no number. Below 0 it has its
            version from somewhere else: it is newer than every one of the roots.
        pause_s: how long its last pause was seen, in seconds; no finer than the interval between two looks.
        error: why it could not be asked.
    """

    engine: str
    kind: str = ""
    state: str = "unreachable"
    version: str = ""
    lag: int | None = None
    pause_s: float = 0.0
    error: str | None = None


app = Typer()


@app.command()
def watch(
    targets: Annotated[
        list[str],
        Argument(metavar="TARGET...", help="An engine's host:port or http(s) URL; a root's path or URL."),
    ],
    interval_s: Annotated[float, Option(min=0.05, max=3600, help="From one look to the next, in seconds.")] = 1.0,
    looks: Annotated[
        int | None, Option(min=1, metavar="N", help="End after so many looks; with --json after 1 by default.")
    ] = None,
    versions: Annotated[int, Option(min=1, metavar="N", help="Newest versions of each root to show.")] = 8,
    timeout_s: Annotated[float, Option(help="Deadline of each question, in seconds.")] = 5.0,
    api_key: APIKey = None,
) -> int:
    """Show versions, bytes, pauses, lag and state of roots and engines, live.

    Shows what is published, what each engine serves, how far it is behind, and whether it is paused. Only questions are
    asked; nothing is changed. A pipe gets plain lines for each look, and --json the last look. Ctrl-C ends it.

    Example: `torchrl-ext watch host1:8000 host2:8000 /shared/updates`
    """
    seen = Watch(targets, api_key=api_key, timeout_s=timeout_s, versions=versions)
    console = Console(highlight=False)  # its lines wrap at the width of the terminal
    with contextlib.closing(seen), contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        on_screen = console.is_terminal and not as_json.get()
        live = stack.enter_context(Live(console=console, auto_refresh=False)) if on_screen else None
        for rows, roots in seen.looks(interval_s, looks or (1 if as_json.get() else None)):
            if live is not None:
                live.update(Group(*_lines(rows, roots)), refresh=True)
            elif not as_json.get():
                answer({}, *_lines(rows, roots))
    return answer({"engines": [asdict(row) for row in seen.engines], "roots": seen.roots})


class Watch:
    """Looks at engines and roots again and again, and keeps what it saw last.

    Args:
        targets: engines and roots, as on the command line.
        api_key: sent to engines as a bearer token.
        timeout_s: deadline of each question, in seconds.
        versions: how many of the newest versions of a root are shown.

    Attributes:
        engines: one for each engine, in the order given.
        roots: one for each root: ``root``, ``latest``, ``versions`` (as ``chain ls`` shows them) or ``error``.
    """

    def __init__(self, targets: Sequence[str], *, api_key: str | None, timeout_s: float, versions: int) -> None:
        self._settings: dict[str, Any] = {"api_key": api_key, "timeout_s": timeout_s}
        self._versions = versions
        self._places = [target for target in targets if _is_root(target)]
        self.engines = [EngineLook(engine=target) for target in targets if not _is_root(target)]
        self.roots: list[dict[str, Any]] = []
        self._clients: dict[str, Any] = {}
        self._paused_since: dict[str, float] = {}

    def looks(self, interval_s: float, count: int | None) -> Iterator[tuple[list[EngineLook], list[dict[str, Any]]]]:
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

    def _root(self, root: str) -> dict[str, Any]:
        from torchrl_ext.stores import open_store
        from torchrl_ext.versions.roots import Reader

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
        from torchrl_ext.registry import engines
        from torchrl_ext.rpc.discovery import discover

        url = before.engine
        try:
            if url not in self._clients:
                (found,) = discover(url, **self._settings)
                self._clients[url] = engines.make(found.kind, url=found.url, **self._settings)
            info, rest = self._clients[url].info(), self._clients[url].state()
        except WeightSyncError as error:
            self._clients.pop(url, None)
            return replace(before, state="unreachable", error=error.what)
        state = "asleep" if rest.asleep else _STATES[rest.paused]
        pause_s = before.pause_s
        if state == "paused":
            pause_s = time.monotonic() - self._paused_since.setdefault(url, time.monotonic())
        else:
            self._paused_since.pop(url, None)
        return EngineLook(engine=url, kind=info.kind, state=state, version=info.weight_version, pause_s=pause_s)

    def _count_lag(self) -> None:
        from torchrl_ext.types import label_number  # which imports torch, unlike a page of help

        served = {one.engine: number for one in self.engines if (number := label_number(one.version)) is not None}
        published = [root["latest"] for root in self.roots if "latest" in root]
        newest = max(published or served.values(), default=0)
        self.engines = [
            replace(one, lag=newest - served[one.engine] if one.engine in served else None) for one in self.engines
        ]


def _is_root(target: str) -> bool:
    scheme, separator, _ = target.partition("://")
    return scheme not in ("http", "https") if separator else "/" in target or os.path.isdir(target)


def _lines(looks: Sequence[EngineLook], roots: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    """Yield a line per engine, root and version; none is cut, so that addresses and paths stay whole."""
    width = max((len(one.engine) for one in looks), default=0)
    for one in looks:
        behind = "" if one.lag is None else "other run" if one.lag < 0 else f"behind {one.lag}"
        pause = f"last pause {one.pause_s:.1f} s" if one.pause_s else ""
        version = f"version {one.version}" if one.version else ""
        words = (one.kind, version, behind, pause, one.error)
        state = (f"{one.state:<12}", _COLOURS.get(one.state, "yellow"))
        yield Text.assemble(f"{one.engine:<{width}}  ", state, "  ".join(filter(None, words)))
    for root in roots:
        yield Text.assemble((root["root"], "bold"), (f"  {root['error']}" if "error" in root else "", "bold red"))
        rows = [version_line(row) for row in reversed(root.get("versions", ()))]
        yield from map(Text, [VERSION_HEAD, *rows] if rows else ())
