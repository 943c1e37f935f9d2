"""Writes the tables of ``benchmarks.md`` and the plots ``img/{bits,pause}.svg`` from ``benchmarks.json``.

Run it as ``python docs/draw_benchmarks.py``, after ``python -m tests.bench peers --out docs/benchmarks.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
STYLE = f"""
text {{ font: 14px {FONT}; fill: #1f2328 }}
.end {{ text-anchor: end }}
.title {{ font-weight: 600; font-size: 16px }}
.head {{ font-weight: 600 }}
.small {{ font-size: 12px; fill: #59636e }}
.ours {{ fill: #0969da; stroke: #0969da }}
.theirs {{ fill: #818b98; stroke: #818b98 }}
.page {{ fill: #ffffff; stroke: #d1d9e0 }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #f0f6fc }}
.small {{ fill: #9198a1 }}
.ours {{ fill: #58a6ff; stroke: #58a6ff }}
.page {{ fill: #0d1117; stroke: #3d444d }}
}}
"""
Row = Mapping[str, Any]
NAMES = {
    "ulp": "torchrl_ext, ulp",
    "context": "torchrl_ext, context",
    "xor + zstd": "xor + zstd-1",
    "int32 + bf16": "int32 + bf16 pairs",
}
SERVERS = {"vllm": "vLLM", "sglang": "SGLang"}
PLOTTED = {
    "vLLM": [
        ("vllm", "delta, ulp"),
        ("vllm", "ipc"),
        ("vllm", "collective"),
        ("vllm", "disk"),
        ("vllm", "safetensors + reload_weights by hand"),
    ],
    "SGLang": [
        ("sglang", "delta, ulp"),
        ("sglang", "ipc"),
        ("sglang", "collective"),
        ("sglang", "disk"),
        ("sglang", "update_weights_from_tensor by hand"),
        ("sglang", "safetensors + update_weights_from_disk by hand"),
    ],
}
"""Ways in the plot of bytes and pauses, by make, ours first."""


def part(document: Row, name: str) -> list[Row]:
    """Return the rows of a part."""
    return [row for row in document["rows"] if row["part"] == name]


def size_of(count: float) -> str:
    """Return a number of bytes in the largest unit that leaves 1 or more."""
    for unit, value in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= value:
            return f"{count / value:.3g}\u00a0{unit}"
    return f"{count:.0f} B"


def time_of(seconds: float) -> str:
    """Return a time in ms, or in s from 1 on."""
    if seconds < 1e-3:
        return "< 1\u00a0ms"
    return f"{seconds:.2f}\u00a0s" if seconds >= 1 else f"{1000 * seconds:.3g}\u00a0ms"


def pause_of(row: Row) -> str:
    """Return a pause; one that is shorter than the time between two answers cannot be seen."""
    return time_of(row["pause_s"]) if row["pause_s"] > row["usual_gap_s"] else f"< {time_of(row['usual_gap_s'])}"


def number(value: float) -> str:
    """Return three digits, at most three of them decimals."""
    return f"{value:.0f}" if value >= 100 else f"{round(value, 3):.3g}"


# tables


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def described(document: Row) -> str:
    """Return when and where it ran, and on what."""
    machine, versions, model = document["machine"], document["versions"], document["model"]
    where = f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, no GPU"
    listed = ", ".join(f"{name} {release}" for name, release in versions.items())
    return (
        f"Run on {document['date']} by `{document['command']}`, which took {document['seconds'] / 60:.0f} minutes "
        f"({where}). Versions: {listed}. The model is a Qwen3 of {model['parameters'] / 1e6:.3g} M bfloat16 parameters "
        f"in {model['tensors']} tensors ({size_of(model['bytes'])}); one step of AdamW changes "
        f"{100 * model['density']:.2f} % of its elements."
    )


def bits(document: Row) -> str:
    """Return the table of layouts."""
    rows = []
    for row in part(document, "bits"):
        if "error" in row:
            rows.append([row["error"], "", "", "", ""])
            continue
        steps = f"{row['steps']} step{'s' if row['steps'] > 1 else ''}, {100 * row['density']:.2f} %"
        cells = [size_of(row["bytes"]), number(row["bits_per_changed"]), number(row["encode_of_copy"])]
        rows.append([NAMES[row["name"]], steps, *cells])
    return table(["layout", "changed by", "bytes", "bits per changed element", "encoding / a copy"], rows)


def engines(document: Row) -> str:
    """Return a table for each server, ours first, and the errors of the ways that failed below it."""
    found = []
    for server, title in SERVERS.items():
        rows = [row for row in part(document, "engine") if row["server"] == server]
        if not rows:
            continue
        cells = [_cells(row) for row in sorted(rows, key=lambda row: not row["ours"]) if "error" not in row]
        head = ["way", "bytes", "bits", "encode", "pause (/ a copy)", "reported", "total (/ a copy)", "memory"]
        found.append(f"**{title}**\n\n{table(head, cells)}")
        found += [f"*{row['name']}* failed: `{row['error']}`" for row in rows if "error" in row]
    return "\n\n".join(found)


def _cells(row: Row) -> list[str]:
    name = f"**{row['name']}**" if row["ours"] else row["name"]
    memory = "" if row["memory_of_model"] is None else f"{row['memory_of_model']:.2f}"
    return [
        name,
        size_of(row["bytes"]),
        number(row["bits_per_changed"]),
        time_of(row["encode_s"]),
        f"{pause_of(row)} ({number(row['pause_of_copy'])})",
        time_of(row["reported_pause_s"]) if "reported_pause_s" in row else "",
        f"{time_of(row['total_s'])} ({number(row['total_of_copy'])})",
        memory,
    ]


# plots


def svg(width: int, height: int, title: str, body: Sequence[str]) -> str:
    """Return a picture whose colours follow the reader's scheme, on a ground of its own, as in `draw_update`."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
    ground = f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>'
    lines = [head, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", ground, *body, "</svg>"]
    return "\n".join(lines) + "\n"


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Return words at a place."""
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}">{escape(words)}</text>'


def bar(x: int, y: int, length: float, kind: str) -> str:
    """Return one bar of at least two pixels."""
    return f'<rect class="{kind}" rx="2" x="{x}" y="{y}" width="{max(2.0, length):.1f}" height="14"/>'


def bits_plot(document: Row) -> str:
    """Bits per changed element, one step of AdamW."""
    rows = [(NAMES[row["name"]], row) for row in part(document, "bits") if row.get("steps") == 1]
    rows.sort(key=lambda pair: pair[1]["bits_per_changed"])
    most = max((row["bits_per_changed"] for _, row in rows), default=1.0)
    body = [text(12, 24, "Bits per changed element, one step of AdamW in bfloat16", "title")]
    for place, (name, row) in enumerate(rows):
        y = 40 + 24 * place
        length = 430 * row["bits_per_changed"] / most
        body += [text(230, y + 12, name, "end"), bar(240, y, length, "ours" if row["ours"] else "theirs")]
        body.append(text(248 + length, y + 12, number(row["bits_per_changed"]), "head" if row["ours"] else ""))
    return svg(800, 52 + 24 * len(rows), "Bits per changed element of every layout", body)


def pause_plot(document: Row) -> str:
    """Bytes and pause of one update, ours beside the alternatives, in one engine of each make."""
    known = {(row["server"], row["name"]): row for row in part(document, "engine") if "error" not in row}
    versions = document["versions"]
    groups = {
        f"{make} {versions.get(make.lower(), '')}": [known[key] for key in keys if key in known]
        for make, keys in PLOTTED.items()
    }
    shown = [row for rows in groups.values() for row in rows]
    most = {key: max((row[key] for row in shown), default=1.0) for key in ("bytes", "pause_s")}
    body = [text(310, 24, "bytes of an update", "head"), text(565, 24, "pause of the engine", "head")]
    y = 30
    for title, rows in groups.items():
        body.append(text(12, y + 14, title, "title"))
        y += 24
        for row in rows:
            kind = "ours" if row["ours"] else "theirs"
            name = f"torchrl_ext {row['name']}" if row["ours"] else row["name"].replace("safetensors + ", "")
            body.append(text(300, y + 12, name, "end"))
            for x, key, words in ((310, "bytes", size_of(row["bytes"])), (565, "pause_s", pause_of(row))):
                length = 155 * row[key] / most[key]
                body += [bar(x, y, length, kind), text(x + 8 + length, y + 12, words, "small")]
            y += 22
        y += 8
    model = document["model"]
    first = f"{model['parameters'] / 1e6:.3g} M bfloat16 parameters, {100 * model['density']:.1f} % changed"
    where = f"{document['machine']['cores']} CPU cores, {document['date']}; shorter is better"
    body.append(text(12, y + 12, f"{first}; {where}", "small"))
    return svg(800, y + 24, "Bytes and pause of one update, beside the alternatives", body)


TABLES = {"run": described, "bits": bits, "engines": engines}
PLOTS = {"bits": bits_plot, "pause": pause_plot}


def page(words: str, document: Row) -> str:
    """Return the page with all that stands between its marks written anew."""
    for name, make in TABLES.items():
        before, mark, rest = words.partition(f"<!-- {name}: from benchmarks.json -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not (mark and end):
            raise ValueError(f"benchmarks.md has no place for {name}")
        words = f"{before}{mark}{make(document)}\n{end}{after}"
    return words


def main() -> None:
    """Write the page and the plots."""
    document = json.loads((FOLDER / "benchmarks.json").read_text())
    target = FOLDER / "benchmarks.md"
    target.write_text(page(target.read_text(), document))
    for name, draw in PLOTS.items():
        (FOLDER / "img" / f"{name}.svg").write_text(draw(document))


if __name__ == "__main__":
    main()
