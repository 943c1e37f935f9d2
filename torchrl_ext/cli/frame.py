"""What all commands share: declaration, `--json`, ``--api-key``, exit statuses, one form of errors, signals.

A command is a plain function of a module that imports nothing heavy (torch is imported in function bodies), registered
with the module's ``app``, a `typer.Typer`. Its docstring is its help, in Markdown. It returns its exit status, most
often by `answer`, and raises errors as they come.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import FrameType
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import torchrl_ext
from torchrl_ext.base.errors import ConfigError, IntegrityError, ManifestError, StoreError, WeightSyncError

__all__ = [
    "COMMANDS",
    "APIKey",
    "Interrupts",
    "answer",
    "app_of",
    "as_json",
    "fail",
    "note",
    "progress",
    "run",
    "table",
]

COMMANDS = {
    "demo": "train a tiny policy and keep an engine at its newest weights, with proof",
    "discover": "list the engines at the given addresses",
    "push": "load a checkpoint into running engines",
    "serve": "install and start an engine that can follow a trainer",
    "chain": "list and unpack the versions under a root",
    "plan": "recommend a transport for a deployment",
    "doctor": "find problems that would make an update fail",
    "watch": "show versions, bytes, lag and state of roots and engines, live",
    "bench": "measure transports on this machine",
}
"""Name -> one line."""

_STATUSES: dict[type[BaseException], int] = {
    ConfigError: 2,
    typer.TyperException: 2,
    StoreError: 4,
    IntegrityError: 1,
    ManifestError: 1,
    WeightSyncError: 3,
    OSError: 4,
    KeyboardInterrupt: 130,
}
"""Class of an error -> exit status; the first class that fits counts (`DeadlineError` is an `OSError`, too)."""

_COMPLETING = "_TORCHRL_EXT_COMPLETE"  # the variable of the environment by which a shell asks for completions
_UNWRAPPED = 1 << 20
_JSON = "`--json`, anywhere in the line, prints one JSON document on standard output."
_ADDRESS = re.compile(r"https?://\S+|[^\s/=]+:\d+/?")

as_json: ContextVar[bool] = ContextVar("as_json", default=False)
"""Whether the command prints one JSON document; set from the command line."""

APIKey = Annotated[
    str | None,
    typer.Option(
        envvar="TORCHRL_EXT_API_KEY",
        metavar="KEY",
        help="Bearer token for engines. Prefer the environment variable: everybody on this machine can read command "
        "lines.",
    ),
]


def answer(document: Mapping[str, Any], *shown: RenderableType, status: int = 0) -> int:
    """Print a command's result: with `--json` the document, else strings as they are and tables as rich draws them.

    Returns:
        ``status``.
    """
    if as_json.get():
        print(json.dumps(document), flush=True)
        return status
    console = Console(soft_wrap=True, highlight=False, markup=False)  # paths and errors have brackets, too
    if not console.is_terminal:
        console.width = _UNWRAPPED  # a pipe's lines stay whole, for grep
    for part in shown:
        print(part, flush=True) if isinstance(part, str) else console.print(part)
    return status


def table(*columns: str) -> Table:
    """Return an empty table whose first column, which holds addresses, is never cut, and whose last one is wrapped."""
    made = Table(*columns, box=SIMPLE, padding=(0, 1, 0, 0))
    made.columns[0].no_wrap, made.columns[-1].overflow = True, "fold"
    return made


def note(line: str) -> None:
    """Print a line of progress to standard error, and flush."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show a bar on standard error while the block runs, if that is a terminal; it disappears at the end.

    Args:
        what: the step, as the bar's label.
        total: bytes that the step processes; None shows only the time.

    Returns:
        A context; its value takes the number of bytes processed since its last call.
    """
    console = Console(stderr=True)
    if not (console.is_terminal and console.is_interactive):
        yield lambda nbytes: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bars:
        yield partial(bars.advance, bars.add_task(what, total=total))


def fail(error: BaseException, *shown: RenderableType, **more: Any) -> int:
    """Print an error as one line on standard error, with `--json` also as a document, and return its exit status.

    Args:
        error: of a class that `run` catches.
        shown: as for `answer`.
        more: further fields of the document.
    """
    kind = type(error).__name__
    message = (error.format_message() if isinstance(error, typer.TyperException) else str(error)) or kind
    note(f"torchrl-ext: {message}")
    reason = error.__cause__ if isinstance(error.__cause__, StoreError) else error  # of an update that failed by it
    status = next(status for known, status in _STATUSES.items() if isinstance(reason, known))
    return answer({**more, "error": message, "type": kind}, *shown, status=status)


def run(argv: list[str]) -> int:
    """Run the command that ``argv`` names, and return its exit status; see `torchrl_ext.cli.main.main`."""
    as_json.set("--json" in argv)
    words = [word for word in argv if word != "--json"]
    try:
        command = typer.main.get_command(_program(words))
        status = command([*_repeated(words)] or ["--help"], "torchrl-ext", standalone_mode=False)
        interrupted = status == _STATUSES[KeyboardInterrupt]  # typer turns the exception into its status
        return fail(KeyboardInterrupt("interrupted")) if interrupted else status or 0
    except typer.TyperException as error:
        if as_json.get():
            return fail(error)
        from typer.rich_utils import rich_format_error

        rich_format_error(error)  # type: ignore[arg-type]  # each is also of typer's own class
        return _STATUSES[typer.TyperException]
    except tuple(_STATUSES) as error:
        return fail(error)
    except Exception as error:
        if as_json.get():
            answer({"error": str(error) or type(error).__name__, "type": type(error).__name__})
        raise


def app_of(name: str) -> typer.Typer:
    """Return a command, or the group of its actions, from the module of its name in `torchrl_ext.cli.commands`."""
    app: typer.Typer = importlib.import_module(f"torchrl_ext.cli.commands.{name}").app
    return app


def _program(words: Sequence[str]) -> typer.Typer:
    """Return the program. It imports the commands among ``words`` only, so that help needs none of their packages."""
    program = typer.Typer(rich_markup_mode="markdown", callback=_options)
    for name, line in COMMANDS.items():
        if name not in words and _COMPLETING not in os.environ:
            program.command(name, help=line)(lambda: None)
            continue
        app = app_of(name)
        app.rich_markup_mode = program.rich_markup_mode
        for command in app.registered_commands:
            command.epilog = _JSON
        single = len(app.registered_commands) == 1
        program.add_typer(app, name=None if single else name, epilog=_JSON)
    return program


def _version(wanted: bool) -> None:
    if wanted:
        print(torchrl_ext.__version__)
        raise typer.Exit


def _options(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Keep running inference engines at a TorchRL policy's newest weights."""


def _repeated(words: Sequence[str]) -> Iterator[str]:
    """Yield the words, with ``--engines`` before each address of ``--engines URL URL``, as typer wants it."""
    listing, before = False, ""
    for word in words:
        address = _ADDRESS.fullmatch(word) is not None
        if listing and before != "--engines" and address:
            yield "--engines"
        listing = word == "--engines" or (listing and (before == "--engines" or address))
        yield word
        before = word


class Interrupts:
    """Turns SIGINT and SIGTERM into `KeyboardInterrupt`, for the length of a ``with`` block in the main thread.

    An update that runs can be finished first (`deferred`), so that no engine stays paused.
    """

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, Any] = {}
        self._what = ""  # what goes on, and must not be cut short by a first signal
        self._pending = self._ignoring = False

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self, what: str) -> Iterator[None]:
        """Hold a first signal back until the end of the block; a second one interrupts the block.

        Args:
            what: what goes on, for the note on standard error.
        """
        self._what, self._pending = what, False
        try:
            yield
        finally:
            self._what = ""
        if self._pending:
            raise KeyboardInterrupt

    def ignore(self) -> None:
        """Ignore signals from now on, since what is left to be done must not be cut short."""
        self._ignoring = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._what and not self._pending and not self._ignoring:
            self._pending = True
            note(f"finishing {self._what} first; interrupt again to abandon it")
        elif not self._ignoring:
            raise KeyboardInterrupt
