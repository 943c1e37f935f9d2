"""``torchrl-ext watch TARGET...``: show what engines serve and what is published, as it changes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from typer import Argument, Option, Typer

from torchrl_ext.base.errors import ConfigError, WeightSyncError
from torchrl_ext.cli.commands.chain import VERSION_HEAD, version_line
from torchrl_ext.cli.frame import APIKey, answer, as_json

__all__ = ["app", "look"]

_COLOURS = {"serving": "green", "unreachable": "bold red"}
_NEWEST = 8  # versions of each root

app = Typer()


@app.command()
def watch(
    targets: Annotated[list[str], Argument(metavar="TARGET...", help="Engines (host:port); paths or URLs of roots.")],
    interval_s: Annotated[float, Option(min=0.05, max=3600, help="From one look to the next, in seconds.")] = 1.0,
    looks: Annotated[
        int | None, Option("--looks", min=1, metavar="N", help="End after so many; with --json after 1 by default.")
    ] = None,
    timeout_s: Annotated[float, Option(help="Deadline of each question, in seconds.")] = 5.0,
    api_key: APIKey = None,
) -> int:
    """Show versions, bytes, lag and state of roots and engines, live.

    Shows what is published, what each engine serves, how far it is behind, and whether it is paused. Only questions are
    asked; nothing is changed. A pipe gets plain lines for each look, and --json the last look. Ctrl-C ends it.

    Example: `torchrl-ext watch host1:8000 host2:8000 /shared/updates`
    """
    console = Console(highlight=False)  # its lines wrap at the width of the terminal
    looks = looks or (1 if as_json.get() else None)
    document: dict[str, Any] = {"engines": [], "roots": []}
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        on_screen = console.is_terminal and not as_json.get()
        live = stack.enter_context(Live(console=console, auto_refresh=False)) if on_screen else None
        while looks is None or looks > 0:
            began = time.monotonic()
            document = look(targets, api_key=api_key, timeout_s=timeout_s)
            if live is not None:
                live.update(Group(*_lines(**document)), refresh=True)
            elif not as_json.get():
                answer({}, *_lines(**document))
            looks = None if looks is None else looks - 1
            if looks != 0:
                time.sleep(max(0.0, interval_s - (time.monotonic() - began)))
    return answer(document)


def look(targets: Sequence[str], **settings: Any) -> dict[str, list[dict[str, Any]]]:
    """Look at engines and roots once; ``settings`` are of the engines' clients: ``api_key``, ``timeout_s``.

    Returns:
        ``engines``: each with ``engine``, ``kind``, ``state`` (``"serving"``, ``"paused"``, ``"asleep"``,
        ``"unreachable"``, or ``"unknown"`` where it cannot say), ``version`` (the label of its weights), ``lag``
        (versions behind the newest of all targets; below 0 for another run's; None without a number) and ``error``.
        ``roots``: each with ``root``, and ``latest`` and ``versions`` (as ``chain ls`` shows them) or ``error``.
    """
    from torchrl_ext.base.types import label_number  # which imports torch, unlike a page of help

    with ThreadPoolExecutor(min(64, len(targets))) as pool:
        engines = list(pool.map(partial(_engine, settings), (one for one in targets if not _is_root(one))))
    roots = [_root(one) for one in targets if _is_root(one)]  # later: no engine is ahead of what it reads
    served = [label_number(one["version"]) for one in engines]
    published = [root["latest"] for root in roots if "latest" in root]
    newest = max(published or (number for number in served if number is not None), default=0)
    for one, number in zip(engines, served, strict=True):
        one["lag"] = None if number is None else newest - number
    return {"engines": engines, "roots": roots}


def _engine(settings: Mapping[str, Any], target: str) -> dict[str, Any]:
    from torchrl_ext.base.registry import engines as makes
    from torchrl_ext.control.discovery import discover

    row = {"engine": target, "kind": "", "version": "", "error": None}
    try:
        (found,) = discover(target, **settings)
        with contextlib.closing(makes.make(found.kind, url=found.url, **settings)) as client:
            paused, rest = client.paused(), client.state()
    except WeightSyncError as error:
        return row | {"state": "unreachable", "error": error.what}
    state = "asleep" if rest.asleep else {None: "unknown", True: "paused", False: "serving"}[paused]
    return row | {"kind": found.kind, "version": found.weight_version, "state": state}


def _root(root: str) -> dict[str, Any]:
    from torchrl_ext.data.stores.opening import open_store
    from torchrl_ext.data.versions.roots import Reader

    try:
        reader = Reader(open_store(root), None)
        if not reader.store.available():
            raise ConfigError("there is nothing here yet")
        rows = [reader.summary(number) for number in reader.chain.numbers()[-_NEWEST:]]
        return {"root": root, "latest": reader.chain.latest(), "versions": rows}
    except FileNotFoundError:
        return {"root": root, "error": "a version went away while it was read"}
    except (WeightSyncError, OSError) as error:
        return {"root": root, "error": error.what if isinstance(error, WeightSyncError) else str(error)}


def _is_root(target: str) -> bool:
    scheme, separator, _ = target.partition("://")
    if separator:
        return scheme not in ("http", "https")
    named = ":" in target or "." in target or target == "localhost"  # else a directory that may not be there yet
    return "/" in target or not named or os.path.isdir(target)


def _lines(engines: Sequence[Mapping[str, Any]], roots: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    """Yield a line per engine, root and version; none is cut, so that addresses and paths stay whole."""
    width = max((len(one["engine"]) for one in engines), default=0)
    for one in engines:
        behind = "" if one["lag"] is None else "other run" if one["lag"] < 0 else f"behind {one['lag']}"
        words = (one["kind"], one["version"] and f"version {one['version']}", behind, one["error"])
        state = (f"{one['state']:<12}", _COLOURS.get(one["state"], "yellow"))
        yield Text.assemble(f"{one['engine']:<{width}}  ", state, "  ".join(filter(None, words)))
    for root in roots:
        yield Text.assemble((root["root"], "bold"), (f"  {root['error']}" if "error" in root else "", "bold red"))
        rows = [version_line(row) for row in reversed(root.get("versions", ()))]
        yield from map(Text, [VERSION_HEAD, *rows] if rows else ())
