"""Draws ``img/grpo.svg`` from ``grpo.json``: the reward of each step, by transport and by seed.

Run it as ``python docs/draw_grpo.py``. With ``--engine HOST:PORT`` it first trains against this vLLM, which serves the
checkpoint of ``--model``, and writes ``grpo.json``.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import runpy
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
RUNS = (("delta", 0), ("disk", 0), ("collective", 0), ("delta", 1))
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
STYLE = f"""
text {{ font: 14px {FONT}; fill: #1f2328 }}
.end {{ text-anchor: end }}
.middle {{ text-anchor: middle }}
.title {{ font-weight: 600; font-size: 16px }}
.small {{ font-size: 12px; fill: #59636e }}
.grid {{ stroke: #d1d9e0 }}
.delta {{ stroke: #0969da; fill: none; stroke-width: 2 }}
.seed {{ stroke: #818b98; fill: none; stroke-width: 1.5; stroke-dasharray: 5 4 }}
.disk {{ stroke: #bc4c00; fill: none; stroke-width: 1.5 }}
.collective {{ fill: #1a7f37; stroke: none }}
.page {{ fill: #ffffff; stroke: #d1d9e0 }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #f0f6fc }}
.small {{ fill: #9198a1 }}
.grid {{ stroke: #3d444d }}
.delta {{ stroke: #58a6ff }}
.disk {{ stroke: #f0883e }}
.collective {{ fill: #3fb950 }}
.page {{ fill: #0d1117; stroke: #3d444d }}
}}
"""
LEFT, TOP, WIDTH, HEIGHT = 60, 56, 470, 230
Row = Mapping[str, Any]


def run(engine: str, model: str) -> Row:
    """Train by each of `RUNS` and return what the page shows of it."""
    import torchrl_ext as tx
    from torchrl_ext.control.http import HTTPSession

    torch.set_num_threads(1)
    train, rows = runpy.run_path(str(FOLDER.parent / "tutorials" / "grpo.py"))["train"], []
    for transport, seed in RUNS:
        with tempfile.TemporaryDirectory() as root:
            files = {} if transport == "collective" else {"root": root}
            _, rewards, reports = train(model, engine, tx.make_transport(transport, **files), seed=seed)
        found = {"transport": transport, "seed": seed, "rewards": [round(one, 3) for one in rewards]}
        found |= {"model_bytes": reports[0].model_bytes, "bytes": [report.bytes for report in reports]}
        found["gap"] = [round(report.engines[0].max_gap, 4) for report in reports]
        rows.append(found)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "torchrl")}
    version = HTTPSession(f"http://{engine}").get("/version")["version"]
    return {"date": f"{datetime.date.today():%Y-%m-%d}", "versions": versions | {"vllm": version}, "rows": rows}


def at(step: int, reward: float, steps: int) -> tuple[float, float]:
    """Return where a point lies."""
    return LEFT + WIDTH * (step - 1) / (steps - 1), TOP + HEIGHT * (1 - reward)


def line(rewards: Sequence[float], kind: str) -> str:
    """Return a curve."""
    points = " ".join("{:.1f},{:.1f}".format(*at(step, one, len(rewards))) for step, one in enumerate(rewards, 1))
    return f'<polyline class="{kind}" points="{points}"/>'


def dots(rewards: Sequence[float], kind: str, radius: float) -> str:
    """Return a mark per step."""
    places = [at(step, one, len(rewards)) for step, one in enumerate(rewards, 1)]
    return "\n".join(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>' for x, y in places)


def plot(document: Row) -> str:
    """Return the figure: all transports with the first seed, and another seed by delta."""
    rows, versions = document["rows"], document["versions"]
    steps = len(rows[0]["rewards"])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 356"><style>{STYLE}</style>',
        '<rect class="page" x="0.5" y="0.5" width="739" height="355" rx="6"/>',
        f'<text class="title" x="{LEFT}" y="30">Share of digits in the answers of a batch</text>',
    ]
    for tick in (0, 0.25, 0.5, 0.75, 1):
        _, y = at(1, tick, steps)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="small end" x="{LEFT - 8}" y="{y + 4}">{tick:g}</text>')
    for tick in (1, *range(5, steps + 1, 5)):
        x, _ = at(tick, 0, steps)
        parts.append(f'<text class="small middle" x="{x:.1f}" y="{TOP + HEIGHT + 18}">{tick}</text>')
    parts.append(f'<text class="small middle" x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 36}">step</text>')
    parts += [line(row["rewards"], "seed") for row in rows if row["seed"]]
    first = {row["transport"]: row["rewards"] for row in rows if not row["seed"]}
    parts.append(line(first["delta"], "delta"))
    parts.append(dots(first["disk"], "disk", 5))
    parts.append(dots(first["collective"], "collective", 2.5))
    x, y = LEFT + WIDTH + 24, TOP + 20
    marks = (
        ("delta", f'<line class="delta" x1="{x}" x2="{x + 24}" y1="{y}" y2="{y}"/>'),
        ("disk", f'<circle class="disk" cx="{x + 12}" cy="{y + 26}" r="5"/>'),
        ("collective", f'<circle class="collective" cx="{x + 12}" cy="{y + 52}" r="2.5"/>'),
        ("delta, other seed", f'<line class="seed" x1="{x}" x2="{x + 24}" y1="{y + 78}" y2="{y + 78}"/>'),
    )
    for at_row, (name, mark) in enumerate(marks):
        parts += [mark, f'<text x="{x + 34}" y="{y + 5 + 26 * at_row}">{name}</text>']
    stated = f"{document['date']}, two cores, no GPU: vLLM {versions['vllm']}, TorchRL {versions['torchrl']}"
    parts += [f'<text class="small" x="{LEFT}" y="344">{stated}, torch {versions["torch"]}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", help="HOST:PORT; train against this vLLM first")
    parser.add_argument("--model", default="policy", help="checkpoint directory that the engine serves")
    args = parser.parse_args()
    if args.engine:
        (FOLDER / "grpo.json").write_text(json.dumps(run(args.engine, args.model), indent=1) + "\n")
    (FOLDER / "img" / "grpo.svg").write_text(plot(json.loads((FOLDER / "grpo.json").read_text())))
