"""``torchrl-ext plan``: recommend a transport for a deployment."""

from __future__ import annotations

import inspect
from dataclasses import Field, asdict, fields
from typing import Annotated, Any

import typer

from torchrl_ext.cli.frame import answer
from torchrl_ext.cli.planning import Facts, recommend

__all__ = ["app"]

app = typer.Typer()


def plan(**facts: Any) -> int:
    """Recommend an entry point and a transport for a deployment, and say why the others were left out.

    Example: `torchrl-ext plan --heavy --no-group --shared-path /shared`
    """
    found = recommend(**facts)
    settings = ", ".join(f"{name} {value}" for name, value in found.settings.items())
    flags = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in found.options.items()
    ]
    lines = [f"{found.transport}{f' ({settings})' if settings else ''}"]
    lines += [f"  {row.goal}: {row.entry_point}" for row in found.answers.values()]
    lines += [f"  {' '.join(flags)}", "rejected", *(f"  {name}: {why}" for name, why in found.rejected.items())]
    return answer(asdict(found), *lines)


def _option(fact: Field[Any]) -> inspect.Parameter:
    kind: Any = bool if isinstance(fact.default, bool) else str | None
    option = Annotated[kind, typer.Option(help=fact.metadata["help"])]
    return inspect.Parameter(fact.name, inspect.Parameter.KEYWORD_ONLY, default=fact.default, annotation=option)


plan.__signature__ = inspect.Signature([*map(_option, fields(Facts))])  # type: ignore[attr-defined]
app.command()(plan)
