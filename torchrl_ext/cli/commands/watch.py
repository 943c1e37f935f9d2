"""``torchrl-ext watch TARGET...``: show what engines serve and what is published, as it changes."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from typer import Argument, Option, Typer

from torchrl_ext.base.errors import ConfigError, WeightSyncError
from torchrl_ext.cli.commands.chain import VERSION_HEAD, version_line
from torchrl_ext.cli.frame import APIKey, answer, as_json

__all__ = ["EngineLook", "app", "looks"]

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
        lag: versions behind the newest of all targets; below 0 it is newer than all roots; None without a number.
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
    targets: Annotated[list[str], Argument(metavar="TARGET...", help="Addresses of engines; paths or URLs of roots.")],
    interval_s: Annotated[float, Option(min=0.05, max=3600, help="From one look to the next, in seconds.")] = 1.0,
    number: Annotated[
        int | None, Option("--looks", min=1, metavar="N", help="End after so many; with --json after 1 by default.")
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
    console = Console(highlight=False)  # its lines wrap at the width of the terminal
    number = number or (1 if as_json.get() else None)
    asked = looks(targets, interval_s, number, versions, api_key=api_key, timeout_s=timeout_s)
    engines, places = list[EngineLook](), list[dict[str, Any]]()
    with contextlib.closing(asked), contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        on_screen = console.is_terminal and not as_json.get()
        live = stack.enter_context(Live(console=console, auto_refresh=False)) if on_screen else None
        for engines, places in asked:
            if live is not None:
                live.update(Group(*_lines(engines, places)), refresh=True)
            elif not as_json.get():
                answer({}, *_lines(engines, places))
    return answer({"engines": [asdict(one) for one in engines], "roots": places})


def looks(
    targets: Sequence[str], interval_s: float, number: int | None = None, versions: int = 8, **settings: Any
) -> Generator[tuple[list[EngineLook], list[dict[str, Any]]]]:
    """Look at engines and roots every ``interval_s`` seconds, ``number`` times or for ever.

    Args:
        targets: engines and roots, as on the command line.
        versions: how many of the newest versions of a root are shown.
        settings: of the engines' clients: ``api_key``, ``timeout_s``.

    Yields:
        A row for each engine, and one for each root: ``root``, ``latest``, ``versions`` (as ``chain ls`` shows them)
        or ``error``.
    """
    from torchrl_ext.base.registry import engines as makes
    from torchrl_ext.control.discovery import discover

    clients: dict[str, Any] = {}
    paused_since: dict[str, float] = {}

    def ask(before: EngineLook) -> EngineLook:
        url = before.engine
        try:
            if url not in clients:
                (found,) = discover(url, **settings)
                clients[url] = makes.make(found.kind, url=found.url, **settings)
            info, paused, rest = clients[url].info(), clients[url].paused(), clients[url].state()
        except WeightSyncError as error:
            clients.pop(url, None)
            return replace(before, state="unreachable", error=error.what)
        state, pause_s = "asleep" if rest.asleep else _STATES[paused], before.pause_s
        if state == "paused":
            pause_s = time.monotonic() - paused_since.setdefault(url, time.monotonic())
        else:
            paused_since.pop(url, None)
        return EngineLook(engine=url, kind=info.kind, state=state, version=info.weight_version, pause_s=pause_s)

    engines = [EngineLook(engine=target) for target in targets if not _is_root(target)]
    places = [target for target in targets if _is_root(target)]
    with ThreadPoolExecutor(min(64, len(targets))) as pool:
        try:
            for look in itertools.count(1):
                began = time.monotonic()
                engines = list(pool.map(ask, engines))
                roots = [_root(place, versions) for place in places]  # later: no engine is ahead of what it reads
                engines = _with_lag(engines, roots)
                yield engines, roots
                if look == number:
                    return
                time.sleep(max(0.0, interval_s - (time.monotonic() - began)))
        finally:
            for client in clients.values():
                client.close()


def _root(root: str, versions: int) -> dict[str, Any]:
    from torchrl_ext.data.stores.opening import open_store
    from torchrl_ext.data.versions.roots import Reader

    try:
        reader = Reader(open_store(root), None)
        if not reader.store.available():
            raise ConfigError("there is nothing here yet")
        rows = [reader.summary(number) for number in reader.chain.numbers()[-versions:]]
        return {"root": root, "latest": reader.chain.latest(), "versions": rows}
    except FileNotFoundError:
        return {"root": root, "error": "a version went away while it was read"}
    except (WeightSyncError, OSError) as error:
        return {"root": root, "error": error.what if isinstance(error, WeightSyncError) else str(error)}


def _with_lag(engines: Sequence[EngineLook], roots: Sequence[Mapping[str, Any]]) -> list[EngineLook]:
    from torchrl_ext.base.types import label_number  # which imports torch, unlike a page of help

    served = {one.engine: number for one in engines if (number := label_number(one.version)) is not None}
    published = [root["latest"] for root in roots if "latest" in root]
    newest = max(published or served.values(), default=0)
    return [replace(one, lag=newest - served[one.engine] if one.engine in served else None) for one in engines]


def _is_root(target: str) -> bool:
    scheme, separator, _ = target.partition("://")
    return scheme not in ("http", "https") if separator else "/" in target or os.path.isdir(target)


def _lines(engines: Sequence[EngineLook], roots: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    """Yield a line per engine, root and version; none is cut, so that addresses and paths stay whole."""
    width = max((len(one.engine) for one in engines), default=0)
    for one in engines:
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
