"""``torchrl-ext plan``: recommend a transport for a deployment."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import Field, asdict, fields
from typing import Annotated, Any

import typer

from torchrl_ext.cli.frame import answer
from torchrl_ext.cli.planning import Facts, Recommendation, recommend

__all__ = ["app"]

_SCALES = {"k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}

app = typer.Typer()


def _number(value: object) -> float:
    text = str(value)  # the option's default is a number
    scale = _SCALES.get(text[-1])
    try:
        return float(text) if scale is None else float(text[:-1]) * scale
    except ValueError:
        raise typer.BadParameter(f"{text} is not a number, which may end in {', '.join(_SCALES)}") from None


def _option(fact: Field[Any]) -> inspect.Parameter:
    help, kind = fact.metadata["help"], bool if isinstance(fact.default, bool) else str | None
    option: Any = Annotated[kind, typer.Option(help=help)]
    if type(fact.default) in (int, float):
        option = Annotated[float, typer.Option(help=help, parser=_number, metavar="N")]
    return inspect.Parameter(fact.name, inspect.Parameter.KEYWORD_ONLY, default=fact.default, annotation=option)


def plan(**facts: Any) -> int:
    """Recommend an entry point and a transport for a deployment, and say why the others were left out.

    Numbers may end in k, M, G (or B) and T.

    Example: `torchrl-ext plan --parameters 70B --no-group --shared-path /shared/updates`
    """
    found = recommend(**facts)
    return answer(asdict(found), *_page(found))


plan.__signature__ = inspect.Signature([*map(_option, fields(Facts))])  # type: ignore[attr-defined]
app.command()(plan)


def _page(found: Recommendation) -> Iterator[str]:
    settings = ", ".join(f"{name} {value}" for name, value in found.settings.items())
    yield f"{found.transport}{f' ({settings})' if settings else ''}: {found.reason}."
    for decision in found.answers.values():
        yield f"  {decision.goal}: {decision.entry_point}"
    flags = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in found.options.items()
    ]
    yield f"  {' '.join(flags)}"
    yield "rejected"
    for name, why in found.rejected.items():
        yield f"  {name}: {why}"
