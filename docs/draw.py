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
    trainer, weights, requests, spans = 64, 166, 218, 288  # the tops of rows
    encode, publish, prefetch, commit, over = 226, 344, 432, 624, 766  # when phases begin
    begin, end = 132, 944

    def span(left: int, right: int, row: int, name: str) -> str:
        y, middle = spans + 38 * row, (left + right) // 2
        return f'<path class="line" d="M{left + 3} {y}v6h{right - left - 6}v-6"/>' + text(middle, y + 23, name, "code")

    return picture(
        960,
        370,
        "One update in time: the trainer encodes and publishes, the engine fetches while it generates, and commits and "
        "verifies between two of its steps",
        text(16, 34, "One update by delta: the commit falls between two steps", "title left"),
        text(846, 33, "time, not to scale", "small") + arrow("M918 28h24"),
        rect("lane", 8, trainer - 12, 944, HEIGHT + 24),
        rect("lane", 8, weights - 12, 944, requests + HEIGHT - weights + 24),
        text(20, trainer + 27, "trainer", "bold left"),
        text(20, weights + 17, "engine", "bold left") + text(20, weights + 36, "its weights", "small left"),
        text(20, requests + 27, "its requests", "small left"),
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
        arrow(f"M{commit} {trainer + 23}V{weights - 3}") + text(commit - 36, 144, "commit", "small"),
        arrow(f"M{over} {weights - 3}V{trainer + HEIGHT + 4}") + text(over + 36, 144, "digest", "small"),
        text(20, spans + 14, "report.spans", "code left"),
        span(encode, prefetch, 0, "prepare"),
        span(prefetch, commit, 0, "prefetch"),
        span(commit, over, 0, "commit"),
        span(encode, over, 1, "total"),
    )


def layers() -> str:
    """Return the two layers, and the process in which each part lives."""
    control, data, tall = 112, 232, 70  # the tops of the layers' boxes
    return picture(
        960,
        346,
        "Two layers between trainer and engine: a control layer that calls the engine, a data layer that moves the "
        "bytes, and a sender and a receiver in which they meet",
        text(16, 34, "Control and data travel apart, and meet only in the sender and the receiver", "title left"),
        rect("frame", 12, 52, 372, 280) + text(198, 74, "trainer process"),
        rect("frame", 576, 52, 372, 280) + text(762, 74, "engine, each worker"),
        rect("lane", 198, control - 22, 564, tall + 34) + text(480, control - 3, "control layer"),
        rect("lane", 198, data - 22, 564, tall + 34) + text(480, data - 3, "data layer"),
        box("trainer", 20, 172, 90, "policy", "or any source"),
        box("trainer", 20, 172, 172, "WeightSender", "versions, order,", "deadlines, report", height=142),
        arrow("M96 134V170"),
        box("trainer", 208, 380, control, "EngineClient", "one engine or a fleet", height=tall),
        box("trainer", 208, 380, data, "Transport", "the trainer's end", height=tall),
        arrow(f"M172 {control + 70}h18v-26h16") + arrow(f"M172 {data + 36}h34"),
        arrow(f"M382 {control + 36}h196"),
        text(480, control + 27, "HTTP, Ray, a call", "small") + text(480, control + 56, "pause, load, resume", "small"),
        arrow(f"M382 {data + 36}h196", "line thick"),
        text(480, data + 24, "NCCL, gloo, files,", "small") + text(480, data + 60, "S3, shared memory", "small"),
        box("engine", 580, 752, control, "Plugin", "the engine's routes", height=tall),
        box("engine", 580, 752, data, "LandingEnd", "the worker's end", height=tall),
        box("engine", 788, 940, 172, "WeightReceiver", "checks, lands,", "proves", height=142),
        arrow(f"M752 {control + 44}h18v26h16") + arrow(f"M752 {data + 36}h34"),
        box("engine", 788, 940, 90, "model", "live parameters"),
        arrow("M864 170V136"),
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
    left, middle, right = 84, 514, 944
    half, rest, whole = (left, middle - 6), (middle + 6, right), (left, right)

    def room(kind: str, row: int, sides: tuple[int, int], name: str, words: str) -> str:
        more = [f"stop{'s' if ',' in numbers[name] else ''} {numbers[name]}"] if name in numbers else []
        return box(kind, *sides, floors[row], name, words, *more, height=tall)

    def floor(row: int) -> str:
        return rect("lane", 8, floors[row] - 8, 944, tall + 16) + text(40, floors[row] + tall // 2 + 6, f"{6 - row}")

    return picture(
        960,
        floors[5] + tall + 20,
        "Nine rooms on six floors: base; data and control; sync, where they meet; engines, rl; compat, testing; cli",
        text(16, 34, "Nine rooms, each of which imports lower floors only, and one weight's stops", "title left"),
        *(floor(row) for row in range(6)),
        room("plain", 0, whole, "cli", "torchrl-ext: commands, measurements"),
        room("plain", 1, half, "compat", "words of slime, vime, SkyRL, vLLM, Megatron"),
        room("plain", 1, rest, "testing", "what others run: contracts, the judge of an engine"),
        room("engine", 2, half, "engines", "inside vLLM, SGLang and our own engine"),
        room("trainer", 2, rest, "rl", "TorchRL: schemes, updaters, policies"),
        room("stopped", 3, whole, "sync", "where both layers meet: sender, receiver, engine worker"),
        room("engine", 4, half, "data", "bytes: sources, deltas, versions, transports"),
        room("trainer", 4, rest, "control", "calls: engines, fleets, routers, requests"),
        room("plain", 5, whole, "base", "words: errors, messages, deadlines, reports, names"),
    )


PICTURES = {"rooms": rooms, "update": update, "layers": layers, "choose": choose}

if __name__ == "__main__":
    for name, drawn in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(drawn())
