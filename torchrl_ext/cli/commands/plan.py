"""``torchrl-ext plan``: recommend a transport for a deployment."""

from __future__ import annotations

import inspect
from dataclasses import asdict, fields
from typing import Annotated, Any

import typer

from torchrl_ext.cli.frame import answer
from torchrl_ext.cli.planning import Facts, recommend

__all__ = ["app"]

app = typer.Typer()


def plan(flags: bool = False, **facts: Any) -> int:
    """Recommend a transport for a deployment, as a line of Python, and say why the others were left out.

    Example: `torchrl-ext plan --heavy --no-group --shared-path /shared`
    """
    found = recommend(**facts)
    lines = [f"{found}", "what applies", *(f"  {row.goal}" for row in found.answers.values())]
    lines += ["not chosen", *(f"  {name}: {why}" for name, why in found.rejected.items())]
    if flags:
        given = {f"--{name.replace('_', '-')}": value for name, value in found.options.items()}
        words = " ".join(name if value is True else f"{name} {value}" for name, value in given.items())
        entries = (f"  {row.entry_point}: {row.goal}" for row in found.answers.values())
        lines += ["options of slime and vime", f"  {words}", *entries]
    return answer({**asdict(found), "python": f"{found}"}, *lines)


def _option(name: str, default: Any, text: str) -> inspect.Parameter:
    kind: Any = bool if isinstance(default, bool) else str | None
    option = Annotated[kind, typer.Option(help=text)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)


_facts = [_option(fact.name, fact.default, fact.metadata["help"]) for fact in fields(Facts)]
_flags = _option("flags", False, "also print the options of slime and vime")
plan.__signature__ = inspect.Signature([*_facts, _flags])  # type: ignore[attr-defined]
app.command()(plan)
