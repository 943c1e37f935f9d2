"""Draws ``img/update.svg``, one update in time, for README and the page of concepts: ``python docs/draw_update.py``."""

from __future__ import annotations

from pathlib import Path

TARGET = Path(__file__).parent / "img" / "update.svg"
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
STYLE = f"""
text {{ font: 15px {FONT}; fill: #1f2328; text-anchor: middle }}
.left {{ text-anchor: start }}
.title {{ font-weight: 600; font-size: 18px }}
.bold {{ font-weight: 600 }}
.small {{ font-size: 13px; fill: #59636e }}
.code {{ font: 13px ui-monospace, Menlo, Consolas, monospace; fill: #59636e }}
.page {{ fill: #ffffff; stroke: #d1d9e0 }}
.lane {{ fill: #f6f8fa }}
.trainer {{ fill: #cfe3ff; stroke: #0969da }}
.engine {{ fill: #c9f0d2; stroke: #1a7f37 }}
.stopped {{ fill: #ffd8b5; stroke: #bc4c00 }}
.line {{ fill: none; stroke: #59636e; stroke-width: 1.5 }}
.dashed {{ stroke-dasharray: 2 5 }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #f0f6fc }}
.small, .code {{ fill: #b1bac4 }}
.page {{ fill: #0d1117; stroke: #3d444d }}
.lane {{ fill: #161b22 }}
.trainer {{ fill: #0c2d6b; stroke: #58a6ff }}
.engine {{ fill: #04401b; stroke: #3fb950 }}
.stopped {{ fill: #6b2900; stroke: #f0883e }}
.line {{ stroke: #9198a1 }}
}}
"""
HEIGHT = 40
TRAINER, WEIGHTS, REQUESTS, SPANS = 64, 164, 216, 284  # the tops of rows
ENCODE, PUBLISH, PREFETCH, PAUSE, RESUME = 226, 344, 432, 590, 774  # when phases begin, on the axis of time
BEGIN, END = 132, 944


def box(kind: str, left: int, right: int, top: int, words: str, below: str = "") -> str:
    """Return one phase: a box from ``left`` to ``right``, with a line of words or two."""
    middle, rect = (left + right) // 2, f'x="{left + 2}" y="{top}" width="{right - left - 4}" height="{HEIGHT}"'
    first = text(middle, top + (17 if below else 25), words)
    return f'<rect class="{kind}" rx="5" {rect}/>' + first + (text(middle, top + 33, below, "small") if below else "")


def text(x: int, y: int, words: str, kind: str = "bold") -> str:
    """Return words at a place."""
    return f'<text class="{kind}" x="{x}" y="{y}">{words}</text>'


def arrow(path: str) -> str:
    """Return a line that ends in a head."""
    return f'<path class="line" marker-end="url(#head)" d="{path}"/>'


def span(left: int, right: int, row: int, name: str) -> str:
    """Return a bracket below the phases, with the name that `SyncReport.spans` has for it."""
    y, middle = SPANS + 38 * row, (left + right) // 2
    return f'<path class="line" d="M{left + 3} {y}v6h{right - left - 6}v-6"/>' + text(middle, y + 22, name, "code")


def drawn() -> str:
    """Return the picture."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 366" role="img">',
        "<title>One update in time: the trainer encodes and publishes, the engine fetches while it generates, "
        "and pauses only to commit and verify</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path class="line" d="M1 1L7 4L1 7"/></marker></defs>',
        '<rect class="page" x="0.5" y="0.5" width="959" height="365" rx="8"/>',
        text(16, 32, "One update by delta: engines generate until only the commit is left", "title left"),
        text(858, 32, "time, not to scale", "small") + arrow("M918 28h24"),
        f'<rect class="lane" x="8" y="{TRAINER - 12}" width="944" height="{HEIGHT + 24}" rx="6"/>',
        f'<rect class="lane" x="8" y="{WEIGHTS - 12}" width="944" height="{REQUESTS + HEIGHT - WEIGHTS + 24}" rx="6"/>',
        text(20, TRAINER + 25, "trainer", "bold left"),
        text(20, WEIGHTS + 17, "engine", "bold left") + text(20, WEIGHTS + 34, "its weights", "small left"),
        text(20, REQUESTS + 25, "its requests", "small left"),
        box("trainer", BEGIN, ENCODE, TRAINER, "train"),
        box("trainer", ENCODE, PUBLISH, TRAINER, "encode", "what changed"),
        box("trainer", PUBLISH, PREFETCH, TRAINER, "publish"),
        f'<path class="line dashed" d="M{PREFETCH + 6} {TRAINER + 20}H{RESUME - 6}"/>',
        text((PREFETCH + PAUSE) // 2, TRAINER + 12, "waits", "small"),
        box("trainer", RESUME, END, TRAINER, "train", "next step"),
        box("engine", PREFETCH, PAUSE, WEIGHTS, "prefetch", "fetch, check, decode"),
        box("stopped", PAUSE, 682, WEIGHTS, "commit", "write"),
        box("stopped", 682, RESUME, WEIGHTS, "verify", "digests"),
        box("engine", BEGIN, PAUSE, REQUESTS, "generates with version 7"),
        box("stopped", PAUSE, RESUME, REQUESTS, "paused"),
        box("engine", RESUME, END, REQUESTS, "version 8"),
        arrow(f"M{PREFETCH - 20} {TRAINER + HEIGHT + 1}V{WEIGHTS + 20}h20"),
        arrow(f"M{PAUSE} {TRAINER + 22}V{WEIGHTS - 3}") + text(PAUSE - 28, 142, "pause", "small"),
        arrow(f"M{RESUME} {TRAINER + HEIGHT + 4}V{REQUESTS - 3}") + text(RESUME + 32, 142, "resume", "small"),
        text(20, SPANS + 12, "report.spans", "code left"),
        span(ENCODE, PREFETCH, 0, "prepare"),
        span(PREFETCH, PAUSE, 0, "prefetch"),
        span(PAUSE, RESUME, 0, "pause"),
        span(ENCODE, RESUME, 1, "total"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    TARGET.write_text(drawn())
