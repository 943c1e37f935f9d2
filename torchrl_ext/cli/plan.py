"""``torchrl-ext plan``: recommend a transport for a deployment."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import Field, asdict, fields
from typing import Annotated, Any

import typer

from torchrl_ext.cli.frame import answer
from torchrl_ext.errors import ConfigError
from torchrl_ext.planning import Facts, Recommendation, recommend

__all__ = ["app"]

_SCALES = {"k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}

app = typer.Typer()


def _number(text: str) -> float:
    scale = _SCALES.get(text[-1:])
    try:
        value = float(text) if scale is None else float(text[:-1]) * scale
    except ValueError:
        raise typer.BadParameter(f"{text} is not a number, which may end in {', '.join(_SCALES)}") from None
    return int(value) if value.is_integer() else value


def _option(fact: Field[Any]) -> inspect.Parameter:
    """Return the option of a fact; its default is in its help, so that a fact that is not given is None."""
    text, kind, settings = fact.metadata["help"], str(fact.type), dict[str, Any]()
    if fact.default and fact.name != "parameters":
        text += f"; by default {'yes' if fact.default is True else f'{fact.default:g}'}"
    if kind in ("int", "float"):
        settings = {"parser": _number, "metavar": "N"}
    known: Any = {"int": float, "float": float, "bool": bool}.get(kind, str)
    option = Annotated[known | None, typer.Option(help=text, **settings)]
    return inspect.Parameter(fact.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)


def _with_facts(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command an option for each fact in place of its ``**facts``."""
    own = inspect.signature(command, eval_str=True)
    model, _ = own.parameters.values()
    command.__signature__ = own.replace(parameters=[model, *map(_option, fields(Facts))])  # type: ignore[attr-defined]
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
    from torchrl_ext.weights.checkpoint import CheckpointSource

    given = {name: value for name, value in facts.items() if value is not None}
    if model is not None:
        params = CheckpointSource(model).params()
        given["parameters"] = sum(meta.numel for meta in params)
        given["bytes_per_parameter"] = sum(meta.nbytes for meta in params) / given["parameters"]
    elif "parameters" not in given:
        raise ConfigError("the size of the model is unknown", expected="--parameters N or --model DIR")
    found = recommend(**given)
    return answer(asdict(found), *_page(found))


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
