"""What all commands share: how a command is declared, `--json`, ``--api-key``, exit statuses and one form of errors.

A command is a plain function of a module that imports nothing heavy (torch is imported in function bodies), registered
with the module's ``app``. It returns its exit status, most often by `answer`, and raises errors as they come.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console, RenderableType
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

import torchrl_ext
from torchrl_ext.errors import ConfigError, IntegrityError, ManifestError, StoreError, WeightSyncError

__all__ = ["COMMANDS", "APIKey", "App", "answer", "as_json", "examples", "fail", "note", "run", "table"]

COMMANDS = {
    "demo": (
        "torchrl_ext.cli.demo.command",
        "train a tiny policy and keep an engine at its newest weights, with proof",
    ),
    "discover": ("torchrl_ext.cli.discover", "say which engines run at the given addresses"),
    "push": ("torchrl_ext.cli.push", "put a checkpoint into running engines"),
    "serve": ("torchrl_ext.cli.serve", "install and start an engine that can follow a trainer"),
    "chain": ("torchrl_ext.cli.chain", "list, check, thin out and unpack the versions under a root"),
    "plan": ("torchrl_ext.cli.plan", "say which transport suits a deployment, and what an update costs"),
    "doctor": ("torchrl_ext.cli.doctor.command", "find what will go wrong in an update before it does"),
    "watch": ("torchrl_ext.cli.watch", "show versions, bytes, pauses, lag and state of roots and engines, live"),
    "bench": ("torchrl_ext.cli.bench", "measure transports on this machine"),
}
"""Name -> the module whose ``app`` is the command, and one line."""

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

_ADDRESS = re.compile(r"https?://\S+|[^\s/=]+:\d+/?")

as_json: ContextVar[bool] = ContextVar("as_json", default=False)
"""Whether the command prints one JSON document; set from the command line."""

APIKey = Annotated[
    str | None,
    typer.Option(
        envvar="TORCHRL_EXT_API_KEY",
        metavar="KEY",
        help="Bearer token for engines; better in the environment, since everybody on this machine can read command "
        "lines.",
    ),
]


class _Command(TyperCommand):
    """A command with `--json`, and with options that take several addresses in a row: ``--engines URL URL``."""

    def __init__(self, *, help: str | None = None, **settings: Any) -> None:
        paragraphs = re.sub(r"(?<!\n)\n(?!\n)", " ", help or "")  # a docstring is wrapped where a terminal is not
        super().__init__(help=paragraphs, **settings)

    def get_params(self, ctx: Any) -> list[Any]:
        return [*super().get_params(ctx), *_json_option(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        several = {name for param in self.params if getattr(param, "multiple", False) for name in param.opts}
        spread, option, values = list[str](), "", 0
        for word in args:
            if word in several:
                option, values = word, 0
            elif option and (values == 0 or _ADDRESS.fullmatch(word)):
                spread += [option] if values else []
                values += 1
            else:
                option = ""
            spread.append(word)
        return super().parse_args(ctx, spread)


class _Group(TyperGroup):
    """A command with actions, which takes `--json` before its action as well."""

    def get_params(self, ctx: Any) -> list[Any]:
        return [*super().get_params(ctx), *_json_option(ctx)]


class _Commands(_Group):
    """All commands; a line of help needs none of their modules, and only the one that runs is imported."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: _Command(name=name, help=line) for name, (_, line) in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        found = importlib.import_module(COMMANDS[name][0]).app if name else None  # None: a shell asks for completions
        return name, found and typer.main.get_command(found), rest


def _json_option(ctx: Any) -> list[Any]:
    """Return the option that the program declares, for each of its commands."""
    return [] if ctx.parent is None else [param for param in ctx.find_root().command.params if "--json" in param.opts]


class App(typer.Typer):
    """The commands of one module: a function, or several as the actions of a group, which needs ``help``."""

    def __init__(self, **settings: Any) -> None:
        defaults: dict[str, Any] = {"cls": _Group, "add_completion": False}
        super().__init__(**(defaults | settings))

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        return super().command(name, cls=_Command, **settings)


def examples(*lines: str) -> str:
    """Return the epilog of a command's help from its examples."""
    return "\n\n".join(("[bold]Examples[/]", *(f"  {line}" for line in lines)))


def answer(document: Mapping[str, Any], *shown: RenderableType, status: int = 0) -> int:
    """Print a command's result: with `--json` the document, else strings as they are and tables as rich draws them.

    Returns:
        ``status``.
    """
    if as_json.get():
        print(json.dumps(document), flush=True)
        return status
    console = Console(soft_wrap=True, highlight=False, markup=False)  # paths and errors have brackets, too
    for part in shown:
        if isinstance(part, str):
            print(part, flush=True)
        else:
            console.print(part)
    return status


def table(*columns: str) -> Table:
    """Return an empty table whose first column, which holds addresses, is never cut, and whose last one is wrapped."""
    made = Table(*columns, box=SIMPLE, padding=(0, 1, 0, 0))
    made.columns[0].no_wrap, made.columns[-1].overflow = True, "fold"
    return made


def note(line: str) -> None:
    """Print a line of progress to standard error, and flush."""
    print(line, file=sys.stderr, flush=True)


def fail(error: BaseException, *shown: RenderableType, **more: Any) -> int:
    """Print an error as one line on standard error, with `--json` also as a document, and return its exit status.

    Args:
        error: of a class that `run` catches.
        shown: as for `answer`.
        more: further fields of the document.
    """
    message = (error.format_message() if isinstance(error, typer.TyperException) else str(error)) or type(
        error
    ).__name__
    answer({**more, "error": message, "type": type(error).__name__}, *shown)
    note(f"torchrl-ext: {message}")
    return next(status for kind, status in _STATUSES.items() if isinstance(error, kind))


def run(argv: list[str]) -> int:
    """Run the command that ``argv`` names, and return its exit status; see `torchrl_ext.cli.main.main`."""
    as_json.set("--json" in argv)
    try:
        status = typer.main.get_command(_program)(argv or ["--help"], "torchrl-ext", standalone_mode=False)
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


def _version(wanted: bool) -> None:
    if wanted:
        print(torchrl_ext.__version__)
        raise typer.Exit


_program = App(cls=_Commands, add_completion=True)


@_program.callback()
def _main(
    as_json: Annotated[
        bool, typer.Option("--json", expose_value=False, help="Print one JSON document on standard output.")
    ] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Keep running inference engines at a TorchRL policy's newest weights."""
