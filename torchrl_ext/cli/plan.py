"""``torchrl-ext plan``: recommend a transport for a deployment."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import RenderableType

from torchrl_ext.cli.frame import answer
from torchrl_ext.errors import ConfigError
from torchrl_ext.planning import Facts

if TYPE_CHECKING:
    from torchrl_ext.planning import Recommendation

__all__ = ["app"]

_SCALES = {"k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}

app = typer.Typer()


def _count(value: float) -> str:
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g}"


def _number(text: str) -> float:
    scale = _SCALES.get(text[-1:])
    try:
        return float(text) if scale is None else float(text[:-1]) * scale
    except ValueError:
        raise typer.BadParameter(f"{text} is not a number, which may end in {', '.join(_SCALES)}") from None


def _whole(text: str) -> int:
    value = _number(text)
    if value != int(value):
        raise typer.BadParameter(f"{text} is not a whole number")
    return int(value)


def _declared(fact: Field[Any]) -> inspect.Parameter:
    """Return the option of a fact; its default is in its help, so that a fact that is not given is None."""
    text, default = fact.metadata["help"], cast(Any, fact.default)
    if fact.name != "parameters" and default not in (None, False):
        shown = _count(default).replace(" ", "") if type(default) in (int, float) else default
        text += f"; by default {'yes' if shown is True else shown}"
    settings: dict[str, Any] = {"help": text, "rich_help_panel": "Speeds" if fact.name.endswith("_bytes_s") else None}
    kind: Any = bool
    if "int" in str(fact.type):
        kind, settings = int, settings | {"parser": _whole, "metavar": "N"}
    elif "float" in str(fact.type):
        kind, settings = float, settings | {"parser": _number, "metavar": "X"}
    elif "str" in str(fact.type):
        kind = str
    option = Annotated[kind | None, typer.Option(**settings)]
    return inspect.Parameter(fact.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)


def _with_facts(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command an option for each fact in place of its ``**facts``."""
    own = inspect.signature(command, eval_str=True)
    named = [option for option in own.parameters.values() if option.kind is not option.VAR_KEYWORD]
    command.__signature__ = own.replace(parameters=[*named, *map(_declared, fields(Facts))])  # type: ignore[attr-defined]
    return command


@app.command()
@_with_facts
def plan(
    model: Annotated[
        str | None, typer.Option(metavar="DIR", help="Checkpoint to take parameters and dtype from.")
    ] = None,
    **facts: Any,
) -> int:
    """Recommend an entry point and a transport for a deployment, and say why the others were left out.

    Numbers may end in k, M, G (or B) and T.

    Examples:
    * `torchrl-ext plan --parameters 70B --no-group --shared-path /shared/updates`
    * `torchrl-ext plan --model checkpoints/start --trainer-ranks 8 --json`
    """
    from torchrl_ext.planning import recommend

    given = {name: value for name, value in facts.items() if value is not None}
    if model is not None:
        given |= _measured(model)
    elif "parameters" not in given:
        raise ConfigError("the size of the model is unknown", expected="--parameters N or --model DIR")
    found = recommend(Facts(**given))
    return answer(found.to_json(), *_page(found))


def _measured(directory: str) -> dict[str, Any]:
    from torchrl_ext.weights.checkpoint import CheckpointSource

    params = CheckpointSource(directory).params()
    elements = sum(meta.numel for meta in params)
    size = sum(meta.nbytes for meta in params)
    return {"parameters": elements, "bytes_per_parameter": size / elements}


def _page(found: Recommendation) -> Iterator[RenderableType]:
    yield f"{found.transport}{f' ({found.encoding}) over {found.carrier}' if found.carrier else ''}: {found.reason}."
    for decision in found.answers.values():
        yield f"  {decision.goal}: {decision.entry_point}"
    flags = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in found.options.items()
    ]
    yield f"  {' '.join(flags)}"
    yield "rejected"
    for name, why in found.rejected.items():
        yield f"  {name}: {why}"
