"""``torchrl-ext plan``: from facts about a deployment to a transport, and what an update will cost."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from torchrl_ext.planning.costs import UNCERTAINTY
from torchrl_ext.planning.facts import Facts
from torchrl_ext.planning.recommend import Recommendation, recommend

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
    readers: dict[str, Any] = {"int": (_whole, "N"), "float": (_number, "X"), "str": (str, "TEXT")}
    for one in fields(Facts):
        flag, text = f"--{one.name.replace('_', '-')}", one.metadata["help"]
        kind = str(one.type).removesuffix(" | None")
        if kind == "bool":
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=one.default, help=text)
        else:
            read, shown = readers[kind]
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


def _number(text: str) -> float:
    scale = _SCALES.get(text[-1:])
    return float(text) if scale is None else float(text[:-1]) * scale


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
    for decision in found.answers.values():
        say(f"  {decision.goal}: [bold]{decision.entry_point}[/]")
    flags = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in found.options.items()
    ]
    say(f"  {' '.join(flags)}")
    console.print(_routes_table(found))
    say("[bold]rejected[/]")
    for label, why in _rejections(found).items():
        say(f"  {label}: {why}")
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
    taken = found.chosen.transport, found.chosen.carrier
    for route in sorted(found.routes, key=lambda route: route.seconds):
        if (route.transport, route.carrier) != taken:
            group = f"{route.transport} over {route.carrier}" if route.carrier else route.transport
            lines.setdefault(group, found.rejected[route.label])
    return lines


def _count(value: float) -> str:
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g} "


def _seconds(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f} s"
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
