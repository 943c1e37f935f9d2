"""Draws the pictures of README and of these pages, ``img/*.svg``: ``python docs/draw.py``."""

from __future__ import annotations

import re
from pathlib import Path

IMAGES = Path(__file__).parent / "img"
PAGE = Path(__file__).with_name("architecture.md")
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
STYLE = f"""
text {{ font: 16px {FONT}; fill: #1f2328; text-anchor: middle }}
.left {{ text-anchor: start }}
.title {{ font-weight: 600; font-size: 19px }}
.bold {{ font-weight: 600 }}
.small {{ font-size: 15px; fill: #59636e }}
.code {{ font: 15px ui-monospace, Menlo, Consolas, monospace; fill: #59636e }}
.page {{ fill: #ffffff; stroke: #d1d9e0 }}
.lane {{ fill: #f6f8fa }}
.frame {{ fill: none; stroke: #818b98; stroke-dasharray: 5 4 }}
.trainer {{ fill: #cfe3ff; stroke: #0969da }}
.engine {{ fill: #c9f0d2; stroke: #1a7f37 }}
.stopped {{ fill: #ffd8b5; stroke: #bc4c00 }}
.plain {{ fill: #eaeef2; stroke: #818b98 }}
.line {{ fill: none; stroke: #59636e; stroke-width: 1.5 }}
.thick {{ stroke-width: 4 }}
.dashed {{ stroke-dasharray: 2 5 }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #f0f6fc }}
.small, .code {{ fill: #b1bac4 }}
.page {{ fill: #0d1117; stroke: #3d444d }}
.lane {{ fill: #161b22 }}
.frame {{ stroke: #9198a1 }}
.trainer {{ fill: #0c2d6b; stroke: #58a6ff }}
.engine {{ fill: #04401b; stroke: #3fb950 }}
.stopped {{ fill: #6b2900; stroke: #f0883e }}
.plain {{ fill: #262c36; stroke: #9198a1 }}
.line {{ stroke: #9198a1 }}
}}
"""
HEIGHT = 42


def picture(width: int, height: int, title: str, *parts: str) -> str:
    """Return a whole picture; ``title`` is what a screen reader says of it."""
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto" '
        'markerUnits="userSpaceOnUse"><path class="line" d="M1 1L7 4L1 7"/></marker></defs>',
        f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def text(x: int, y: int, words: str, kind: str = "bold") -> str:
    """Return words at a place."""
    return f'<text class="{kind}" x="{x}" y="{y}">{words}</text>'


def rect(kind: str, x: int, y: int, width: int, height: int) -> str:
    """Return a rectangle with round corners."""
    return f'<rect class="{kind}" rx="5" x="{x}" y="{y}" width="{width}" height="{height}"/>'


def box(kind: str, left: int, right: int, top: int, words: str, *below: str, height: int = HEIGHT) -> str:
    """Return a box from ``left`` to ``right``: a line of bold words, and lines of small ones, in the middle of it."""
    middle, first = (left + right) // 2, top + height // 2 + 6 - 9 * len(below)
    lines = [
        text(middle, first, words),
        *(text(middle, first + 18 * n, line, "small") for n, line in enumerate(below, 1)),
    ]
    return rect(kind, left + 2, top, right - left - 4, height) + "".join(lines)


def arrow(path: str, kind: str = "line") -> str:
    """Return a line that ends in a head."""
    return f'<path class="{kind}" marker-end="url(#head)" d="{path}"/>'


def update() -> str:
    """Return one update by delta in time, with the spans of its report."""
    trainer, weights, requests, spans = 76, 192, 268, 346  # the tops of rows
    encode, publish, prefetch, commit, over = 74, 190, 270, 386, 518  # when phases begin
    begin, end = 16, 624

    def span(left: int, right: int, row: int, name: str) -> str:
        y, middle = spans + 38 * row, (left + right) // 2
        return f'<path class="line" d="M{left + 3} {y}v6h{right - left - 6}v-6"/>' + text(middle, y + 23, name, "code")

    return picture(
        640,
        420,
        "One update in time: the trainer encodes and publishes, the engine fetches while it generates, and commits and "
        "verifies between two of its steps",
        text(16, 34, "One update by delta", "title left"),
        text(520, 33, "time, not to scale", "small") + arrow("M594 28h30"),
        rect("lane", 8, 48, 624, trainer + HEIGHT + 8 - 48),
        rect("lane", 8, weights - 28, 624, requests + HEIGHT + 8 - weights + 28),
        text(18, trainer - 8, "trainer", "bold left"),
        text(18, weights - 8, "engine, its weights", "bold left"),
        text(18, requests - 8, "its requests", "bold left"),
        box("trainer", begin, encode, trainer, "train"),
        box("trainer", encode, publish, trainer, "encode", "what changed"),
        box("trainer", publish, prefetch, trainer, "publish"),
        f'<path class="line dashed" d="M{prefetch + 6} {trainer + 21}H{over - 6}"/>',
        text((prefetch + commit) // 2, trainer + 13, "waits", "small"),
        box("trainer", over, end, trainer, "train", "next step"),
        box("engine", prefetch, commit, weights, "prefetch", "fetch, decode"),
        box("stopped", commit, over, weights, "commit", "write, read back"),
        box("engine", begin, commit, requests, "generates with version 7"),
        f'<path class="line dashed" d="M{commit + 6} {requests + 21}H{over - 6}"/>',
        text((commit + over) // 2, requests + 13, "next step waits", "small"),
        box("engine", over, end, requests, "version 8"),
        arrow(f"M{prefetch - 20} {trainer + HEIGHT + 1}V{weights + 21}h20"),
        arrow(f"M{commit} {trainer + 23}V{weights - 3}") + text(commit - 36, 151, "commit", "small"),
        arrow(f"M{over} {weights - 3}V{trainer + HEIGHT + 4}") + text(over + 36, 151, "digest", "small"),
        text(18, spans + 22, "spans", "code left"),
        span(encode, prefetch, 0, "prepare"),
        span(prefetch, commit, 0, "prefetch"),
        span(commit, over, 0, "commit"),
        span(encode, over, 1, "total"),
    )


def layers() -> str:
    """Return the two layers, and the process in which each part lives."""
    left, right, tall = (50, 250), (390, 590), 66
    ends, control, data = 158, 256, 360  # the tops of boxes
    middle = sum((*left, *right)) // 4

    def wire(top: int, name: str, above: str, below: str, kind: str = "line") -> str:
        lines = text(middle, top + 10, name) + text(middle, top + 30, above, "small")
        return lines + arrow(f"M{left[1]} {top + 39}H{right[0] - 2}", kind) + text(middle, top + 58, below, "small")

    return picture(
        640,
        462,
        "Two layers between trainer and engine: a control layer that calls the engine, a data layer that moves the "
        "bytes, and a sender and a receiver in which they meet",
        text(16, 34, "Control and data meet in sender and receiver", "title left"),
        rect("frame", 12, 52, 254, 398) + text(150, 74, "trainer process"),
        rect("frame", 374, 52, 254, 398) + text(490, 74, "engine, each worker"),
        *(rect("lane", 42, top - 8, 556, tall + 20) for top in (control, data)),
        box("trainer", *left, 86, "policy", "or any source") + arrow(f"M150 130V{ends - 2}"),
        box("trainer", *left, ends, "WeightSender", "versions, order,", "deadlines, report", height=tall),
        box("trainer", *left, control, "EngineClient", "one engine or a fleet", height=tall),
        box("trainer", *left, data, "Transport", "the trainer's end", height=tall),
        arrow(f"M50 {ends + 33}H28V{control + 33}h22") + arrow(f"M28 {control + 33}V{data + 33}h22"),
        wire(control, "control layer", "HTTP, Ray, a call", "pause, load"),
        wire(data, "data layer", "NCCL, gloo, files", "S3, memory", "line thick"),
        box("engine", *right, control, "Plugin", "the engine's routes", height=tall),
        box("engine", *right, data, "LandingEnd", "the worker's end", height=tall),
        arrow(f"M590 {control + 33}h22V{ends + 33}h-22"),
        f'<path class="line" d="M590 {data + 33}h22V{control + 33}"/>',
        box("engine", *right, ends, "WeightReceiver", "checks, lands,", "proves", height=tall),
        box("engine", *right, 86, "model", "live parameters") + arrow(f"M490 {ends}V130"),
    )


def choose() -> str:
    """Return the questions that lead to a transport."""
    left, middle, right = (16, 292), (348, 624), (680, 864)
    rows = [56 + 88 * row for row in range(5)]
    tall = 58

    def ask(column: tuple[int, int], row: int, *words: str) -> str:
        x, y = sum(column) // 2, rows[row] + tall // 2 + 6 - 10 * (len(words) - 1)
        lines = "".join(text(x, y + 20 * n, line, "asked") for n, line in enumerate(words))
        return rect("plain", column[0], rows[row], column[1] - column[0], tall) + lines

    def take(column: tuple[int, int], row: int, name: str, *words: str) -> str:
        return box("engine", column[0] - 2, column[1] + 2, rows[row], name, *words, height=tall)

    def across(start: tuple[int, int], end: tuple[int, int], row: int, answer: str) -> str:
        y = rows[row] + tall // 2
        return arrow(f"M{start[1] + 2} {y}H{end[0] - 2}") + text((start[1] + end[0]) // 2, y - 8, answer, "small")

    def down(x: int, row: int, answer: str) -> str:
        return arrow(f"M{x} {rows[row] + tall + 2}V{rows[row + 1] - 2}") + text(
            x + 20, rows[row] + tall + 20, answer, "small"
        )

    disk, delta = (16, 144), (164, 292)
    return picture(
        880,
        rows[4] + tall + 18,
        "A flow chart that leads to a transport",
        text(16, 34, "Which transport?", "title left"),
        ask(left, 0, "Are trainer and engine", "in one process?"),
        across(left, middle, 0, "yes"),
        take(middle, 0, "memory", "a dictionary"),
        down(154, 0, "no"),
        ask(left, 1, "Do they share a machine,", "a user and a container?"),
        across(left, middle, 1, "yes"),
        take(middle, 1, "ipc", "shared memory, CUDA IPC"),
        down(154, 1, "no"),
        ask(left, 2, "Can they form", "a process group?"),
        across(left, middle, 2, "yes"),
        ask(middle, 2, "Does every engine", "have this package?"),
        across(middle, right, 2, "no"),
        take(right, 2, "native", "the engine's own wire"),
        down(486, 2, "yes"),
        ask(middle, 3, "Is the trainer sharded, or are", "engines tensor parallel?"),
        across(middle, right, 3, "yes"),
        take(right, 3, "sharded", "slices, rank to worker"),
        down(486, 3, "no"),
        take(middle, 4, "collective", "broadcasts by NCCL or gloo"),
        down(154, 2, "no"),
        ask(left, 3, "Is a full checkpoint", "per update too heavy?"),
        down(80, 3, "no"),
        take(disk, 4, "disk", "checkpoints"),
        down(228, 3, "yes"),
        take(delta, 4, "delta", "what changed"),
    )


def stops() -> dict[str, str]:
    """Return the numbers of the stops in each room, as the page of the architecture lists them."""
    found: dict[str, list[str]] = {}
    for number, functions in re.findall(r"^\| (\d+) \| [a-z].* \| (.*) \|$", PAGE.read_text(), re.MULTILINE):
        for room in dict.fromkeys(re.findall(r"\(`(\w+)/", functions)):
            found.setdefault(room, []).append(number)
    return {room: ", ".join(numbers) for room, numbers in found.items()}


def rooms() -> str:
    """Return the nine rooms on their floors, and the numbers of the stops that one weight makes in them."""
    tall, gap, numbers = 72, 18, stops()
    floors = [52 + (tall + gap) * number for number in range(6)]  # from the highest one down
    left, middle, right = 56, 342, 628
    half, rest, whole = (left, middle - 6), (middle + 6, right), (left, right)

    def room(kind: str, row: int, sides: tuple[int, int], name: str, words: str) -> str:
        more = [f"stop{'s' if ',' in numbers[name] else ''} {numbers[name]}"] if name in numbers else []
        return box(kind, *sides, floors[row], name, words, *more, height=tall)

    def floor(row: int) -> str:
        return rect("lane", 8, floors[row] - 8, 624, tall + 16) + text(32, floors[row] + tall // 2 + 6, f"{6 - row}")

    return picture(
        640,
        floors[5] + tall + 20,
        "Nine rooms on six floors: base; data and control; sync, where they meet; engines, rl; compat, testing; cli",
        text(16, 34, "Nine rooms, and one weight's stops", "title left"),
        *(floor(row) for row in range(6)),
        room("plain", 0, whole, "cli", "torchrl-ext: commands, measurements"),
        room("plain", 1, half, "compat", "slime, vime, SkyRL, vLLM, Megatron"),
        room("plain", 1, rest, "testing", "contracts, the judge of an engine"),
        room("engine", 2, half, "engines", "inside vLLM, SGLang, our own"),
        room("trainer", 2, rest, "rl", "TorchRL: schemes, policies"),
        room("stopped", 3, whole, "sync", "where both layers meet: sender, receiver, engine worker"),
        room("engine", 4, half, "data", "bytes: deltas, versions, transports"),
        room("trainer", 4, rest, "control", "calls: engines, fleets, requests"),
        room("plain", 5, whole, "base", "words: errors, messages, deadlines, reports, names"),
    )


PICTURES = {"rooms": rooms, "update": update, "layers": layers, "choose": choose}

if __name__ == "__main__":
    for name, drawn in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(drawn())
