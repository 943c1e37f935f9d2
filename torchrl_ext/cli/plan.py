"""``torchrl-ext plan``: from facts about a deployment to a transport, and what an update will cost."""

from __future__ import annotations

import argparse
import json
import types
import typing
from dataclasses import fields
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from torchrl_ext.planning.costs import UNCERTAINTY
from torchrl_ext.planning.facts import Facts
from torchrl_ext.planning.recommend import BreakEven, Recommendation, recommend

__all__ = ["add_parser", "run"]

_SCALES = {"k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the command: one flag per fact."""
    parser = subparsers.add_parser(
        "plan",
        help="say which transport suits a deployment, and what an update costs",
        description="Recommend an entry point and a transport from facts about a deployment, with predicted seconds, "
        "bytes and pause of every route. Numbers may end in k, M, G (or B) and T.",
    )
    kinds = typing.get_type_hints(Facts)
    for one in fields(Facts):
        flag, text = f"--{one.name.replace('_', '-')}", one.metadata["help"]
        kind = next(iter(set(_members(kinds[one.name])) - {type(None)}))
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=one.default, help=text)
        else:
            read = {int: _whole, float: _number}.get(kind, str)
            shown = {int: "N", float: "X"}.get(kind, "TEXT")
            parser.add_argument(flag, type=read, default=one.default, metavar=shown, help=f"{text} ({one.default})")
    parser.add_argument("--model", metavar="DIR", help="checkpoint directory to take parameters and dtype from")
    return parser


def run(args: argparse.Namespace) -> int:
    """Recommend, and print a page, or with ``--json`` one document.

    Raises:
        ConfigError: facts that cannot be, or under which nothing works.
    """
    given = {one.name: getattr(args, one.name) for one in fields(Facts)}
    if args.model:
        given |= _measured(args.model)
    found = recommend(Facts(**given))
    if args.json:
        print(json.dumps(found.to_json()))
    else:
        _show(found)
    return 0


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _number(text: str) -> float:
    scale = _SCALES.get(text[-1:], 1.0)
    return float(text[:-1] if text[-1:] in _SCALES else text) * scale


def _whole(text: str) -> int:
    value = _number(text)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text} is no whole number")
    return int(value)


def _measured(directory: str) -> dict[str, Any]:
    from torchrl_ext.weights.checkpoint import CheckpointSource

    params = CheckpointSource(directory).params()
    elements = sum(meta.numel for meta in params)
    size = sum(meta.nbytes for meta in params)
    return {"parameters": elements, "tensors": len(params), "bytes_per_parameter": size / elements}


# what is shown


def _show(found: Recommendation) -> None:
    console = Console()

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    say(f"[bold]{found.chosen.label}[/]: {found.reason}.")
    for answer in found.answers.values():
        say(f"  {answer.goal}: [bold]{answer.entry_point}[/]")
    flags = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in found.options.items()
    ]
    say(f"  {' '.join(flags)}")
    console.print(_routes_table(found))
    say("[bold]rejected[/]")
    for label, why in _rejections(found).items():
        say(f"  {label}: {why}")
    say("[bold]where two routes take equally long[/]")
    for one in found.break_evens:
        say(f"  {_even(one)}")
    say(f"What this library's own benchmarks measured may be off by x {UNCERTAINTY:g}: hence the ranges.")
    for note in found.notes:
        say(f"  - {note}")


def _routes_table(found: Recommendation) -> Table:
    facts = found.facts
    title = f"{_count(facts.parameters).strip()} parameters, {facts.density:.2%} changed, {facts.engines:,} engine(s)"
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("route", "bytes", "seconds", "range", "pause"):
        table.add_column(heading, justify="left" if heading == "route" else "right", no_wrap=True)
    for route in found.routes:
        if route.obstacle is None:
            cells = [route.label, f"{_count(route.bytes)}B", _seconds(route.seconds)]
            cells += [f"{_seconds(route.low_s)} to {_seconds(route.high_s)}", _seconds(route.pause_s)]
            table.add_row(*cells, style="bold green" if route is found.chosen else "")
    return table


def _rejections(found: Recommendation) -> dict[str, str]:
    """Return one line per transport and carrier, about the best of its encodings."""
    lines: dict[str, str] = {}
    for route in sorted(found.routes, key=lambda route: route.seconds):
        group = f"{route.transport} over {route.carrier}" if route.carrier else route.transport
        if route is not found.chosen and (route.transport, route.carrier) != (
            found.chosen.transport,
            found.chosen.carrier,
        ):
            lines.setdefault(group, found.rejected[route.label])
    return lines


def _even(one: BreakEven) -> str:
    of = {"density": "density", "disk_bytes_s": "the shared path", "network_bytes_s": "the network"}[one.quantity]
    if one.value is None:
        other = one.above if one.always == one.below else one.below
        return f"{one.always} is sooner than {other} at any {'speed of ' * (of != 'density')}{of}"
    value = f"{one.value:.1%}" if one.quantity == "density" else f"{_count(one.value)}B/s of {of}"
    return f"{one.below} is sooner below {value}, {one.above} above"


def _count(value: float) -> str:
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g} "


def _seconds(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f} s"
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
