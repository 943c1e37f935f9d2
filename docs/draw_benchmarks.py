"""Writes the tables of ``benchmarks.md`` and the plots ``img/{bits,pause}.svg`` from ``benchmarks.json``.

Run it as ``python docs/draw_benchmarks.py``, after ``python -m tests.bench WHAT --out docs/benchmarks.json``.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
STYLE = f"""
text {{ font: 15px {FONT}; fill: #1f2328 }}
.end {{ text-anchor: end }}
.title {{ font-weight: 600; font-size: 16px }}
.head {{ font-weight: 600 }}
.small {{ font-size: 13px; fill: #59636e }}
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
ENGINES = {"embedded": "embedded", "vllm": "vLLM", "sglang": "SGLang"}
PLOTTED = {
    "vllm": {
        "delta, ulp": "delta, ulp",
        "ipc": "ipc",
        "collective": "collective",
        "disk": "disk",
        "safetensors + reload_weights by hand": "reload by hand",
    },
    "sglang": {
        "delta, ulp": "delta, ulp",
        "ipc": "ipc",
        "collective": "collective",
        "disk": "disk",
        "update_weights_from_tensor by hand": "tensors by hand",
        "safetensors + update_weights_from_disk by hand": "reload by hand",
        "update_weights_from_tensor as slime does": "tensors as slime does",
        "safetensors + update_weights_from_disk as slime does": "reload as slime does",
    },
}
"""Ways in the plot of bytes and pauses, by make, ours first, and how they are called there."""
GAP, UPDATE_GAP = "gap / (step + scatter)", "gap of the update / (step + scatter)"
WRITE_GAP = "gap of the write / (steps around it + scatter)"
UPDATES = {
    "first": "first",
    "1 % of tensors": "1 % of tensors",
    "none": "none",
    "every tensor": "every tensor, one element",
}


def part(document: Row, name: str) -> list[Row]:
    """Return the rows of a part of the comparison."""
    return [row for row in document["peers"]["rows"] if row["part"] == name]


def by_engine(document: Row, subject: str) -> dict[str, Row]:
    """Return the records of a subject that has one for each engine."""
    keys = {engine: f"{subject} {engine}" for engine in ENGINES}
    return {engine: document[key] for engine, key in keys.items() if key in document}


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
    if seconds >= 1:
        return f"{seconds:.3g}\u00a0s" if seconds >= 10 else f"{seconds:.2f}\u00a0s"
    return f"{1000 * seconds:.3g}\u00a0ms"


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


def ran(*records: Row) -> str:
    """Return when, by what and where records were made, and with which versions."""
    found: dict[str, list[str]] = {}
    for row in records:
        engine = row.get("engine", "")
        command = _short(row).replace(f"--engine {engine}", "--engine ENGINE")
        found.setdefault(f"`{command}` on {row['date']}", []).append(engine)
    commands = "; ".join(f"{way}{' for ' + ', '.join(names) if names[0] else ''}" for way, names in found.items())
    minutes = sum(row.get("seconds", 0) for row in records) / 60
    took = f", {max(1, round(minutes))} minute{'s' if minutes >= 1.5 else ''} in all" if minutes else ""
    computers = {
        f"{row['machine']['processor']}, {row['machine']['cores']} cores"
        + (f", {row['machine']['memory_gib']} GiB" if "memory_gib" in row["machine"] else "")
        for row in records
    }
    versions = {name: release for row in records for name, release in row["versions"].items()}
    listed = ", ".join(f"{name} {release}" for name, release in versions.items())
    return wrapped(f"Run: {commands}{took} ({'; '.join(sorted(computers))}, no GPU). {listed}.")


def _short(row: Row) -> str:
    return str(row["command"]).replace(" --out docs/benchmarks.json", "")


def wrapped(words: str) -> str:
    """Return lines of at most 118 characters."""
    return textwrap.fill(words, 118, break_long_words=False, break_on_hyphens=False)


def described(document: Row) -> str:
    """Return when and where the comparison ran, and with which model."""
    model = document["peers"]["model"]
    words = (
        f"The model is a Qwen3 of {model['parameters'] / 1e6:.3g} M bfloat16 parameters in {model['tensors']} tensors "
        f"({size_of(model['bytes'])}). One step of AdamW changes {100 * model['density']:.2f} % of its elements."
    )
    return wrapped(f"{ran(document['peers'])} {words}")


def percent(share: float) -> str:
    """Return a share in percent, two digits."""
    return f"{float(f'{100 * share:.2g}'):g} %"


def by_density(document: Row) -> dict[float, dict[str, Row]]:
    """Return the rows of layouts, by the share of elements that change and by name."""
    found: dict[float, dict[str, Row]] = {}
    for row in part(document, "bits"):
        if "error" not in row:
            found.setdefault(row["aim"], {})[row["name"]] = row
    return found


def bits(document: Row) -> str:
    """Return the table of layouts: bits per changed element and time of encoding at each density."""
    found = by_density(document)
    rows = []
    for name in NAMES:
        each = [rows_of[name] for rows_of in found.values()]
        cells = [f"{number(row['bits_per_changed'])} ({number(row['encode_of_copy'])})" for row in each]
        rows.append([NAMES[name], *cells])
    least = [next(iter(rows_of.values())).get("least_bits") for rows_of in found.values()]
    if None not in least:
        rows.append(["*least for these steps*", *map(number, least)])
    rows.append(["*learning rate*", *(f"{next(iter(rows_of.values()))['rate']:.1e}" for rows_of in found.values())])
    return table(["layout", *map(percent, found)], rows)


def engines(document: Row) -> str:
    """Return the table of all ways, ours first in each server, and the errors of the ways that failed below it."""
    memory = {row["name"]: row["memory_of_model"] for row in document.get("memory", {"rows": []})["rows"]}
    cells, failed = [], []
    for server, title in ENGINES.items():
        rows = [row for row in part(document, "engine") if row["server"] == server]
        for row in sorted((row for row in rows if "error" not in row), key=lambda row: not row["ours"]):
            cells.append([title, *_cells(row, memory.get(row["trainer"]))])
            title = ""
        failed += [f"*{row['name']}* of {ENGINES[server]} failed: `{row['error']}`" for row in rows if "error" in row]
    head = ["engine", "way", "bytes", "bits", "encode", "pause (/ a copy)", "reported", "total (/ a copy)", "memory"]
    return "\n\n".join([table(head, cells), *failed, memory_run(document)])


def _cells(row: Row, memory: float | None) -> list[str]:
    return [
        f"**{row['name']}**" if row["ours"] else row["name"],
        size_of(row["bytes"]),
        number(row["bits_per_changed"]),
        time_of(row["encode_s"]),
        f"{pause_of(row)} ({number(row['pause_of_copy'])})",
        time_of(row["reported_pause_s"]) if "reported_pause_s" in row else "",
        f"{time_of(row['total_s'])} ({number(row['total_of_copy'])})",
        "" if memory is None else f"{memory:.2f}",
    ]


def memory_run(document: Row) -> str:
    """Return how the column of memory was measured."""
    if "memory" not in document:
        return "The column *memory* is empty until `python -m tests.bench memory --out docs/benchmarks.json` has run."
    model = document["memory"]["model"]
    return f"*Memory*: a model of {size_of(model['bytes'])}.\n{ran(document['memory'])}"


def gaps(document: Row) -> str:
    """Return the table of gaps between tokens."""
    rows, records = [], by_engine(document, "gaps")
    for engine, row in records.items():
        live, none, paused = row["live"], row["none"], row["paused"]
        whole = [number(each[UPDATE_GAP]) if UPDATE_GAP in each else "" for each in (none, live)]
        cells = [number(none[GAP]), number(live[GAP]), number(live[WRITE_GAP]) if WRITE_GAP in live else ""]
        cells += [number(paused[GAP]), number(row["reload"][GAP]), *whole]
        cells += [f"{row['step_ms']:.0f}, {row['scatter_ms']:.0f}, {live.get('write_ms', 0):.0f} ms"]
        rows.append([f"{ENGINES[engine]}, {row['updates']}", *cells])
    head = ["engine, updates", "no update", "live", "write / steps around it", "paused", "own reload"]
    head += ["whole update: none", "whole update: live", "step, scatter, write"]
    return f"{table(head, rows)}\n\n{ran(*records.values())}"


def names(document: Row) -> str:
    """Return the table of an update of very many names."""
    rows, records = [], by_engine(document, "names")
    for engine, record in records.items():
        title = f"{ENGINES[engine]}, own loading {time_of(record['own_load_s'])}"
        for update, row in record["rows"].items():
            times = [time_of(row[key]) for key in ("total_s", "trainer_s", "engine_s")]
            sizes = [time_of(row["pause_s"]), size_of(row["messages_bytes"])]
            rows.append([title, UPDATES[update], *times, number(row["engine of own"]), *sizes])
            title = ""
    head = ["engine", "update", "total", "trainer", "in the engine", "/ its own loading", "pause", "messages"]
    return f"{table(head, rows)}\n\n{ran(*records.values())}"


def others(document: Row) -> str:
    """Return the table of the small benchmarks."""

    def spread(found: Row) -> str:
        return f"{number(found['median'])} ({number(found['low'])} to {number(found['high'])})"

    moved, landing, digest, small = (document[key] for key in ("transport", "landing", "digest", "small"))
    pieces = [
        number(digest["bfloat16"][f"digest, {kind}"]["x copy"]["median"]) for kind in ("whole", "small", "transposed")
    ]
    commits = [number(landing[f"commit / {way}"]) for way in ("scatter", "vllm", "reload")]
    clones = [number(small["clones"][step]) for step in ("publish", "first prefetch", "prefetch", "commit")]
    rows = [
        [
            moved,
            "`collective` in buckets: time of one flat broadcast / its time",
            spread(moved["collective / broadcast"]),
        ],
        [
            moved,
            "`disk`: time of `save_file` and fsync / time of a publication with checksums",
            spread(moved["disk / save_file"]),
        ],
        [
            landing,
            "vLLM's model, commit of 1 %: / a scatter without checks; / vLLM's sparse patches; / a reload",
            "; ".join(commits),
        ],
        [digest, "digest of bfloat16 weights / a copy: whole; 1,024 small tensors; transposed", "; ".join(pieces)],
        [
            small,
            f"delta of {small['tensors']:,} tensors / a clone of each: publish; first prefetch; later ones; commit",
            "; ".join(clones),
        ],
    ]
    head = ["command", "date", "measures", "result (lowest to highest round)"]
    short = [
        [f"`{row['command'].replace(' --out docs/benchmarks.json', '')}`", row["date"], *cells] for row, *cells in rows
    ]
    return table(head, short)


def misses(document: Row) -> str:
    """Return the targets that the records miss; an earlier figure stands until a record has a newer one."""
    layouts = {aim: rows for aim, rows in by_density(document).items() if "context" in rows}
    earlier = {row["target"]: row for row in document["misses"]["rows"]}
    newer: dict[str, tuple[float, bool]] = {}
    if "least_bits" in (few := layouts.get(0.001, {}).get("context", {})):
        reached = few["bits_per_changed"] / few["least_bits"]
        newer["`context` within 1.06 of the entropy bound at 0.1 %"] = reached, reached > 1.06
    if some := layouts.get(0.01):
        reached = some["xor + zstd"]["encode_of_copy"] / some["ulp"]["encode_of_copy"]
        newer["encoding 4 times as fast as xor + zstd at 1 %"] = reached, reached < 4
    if many := layouts.get(0.1):
        reached = 1 / many["ulp"]["encode_of_copy"]
        newer["encoding at 0.30 of a copy at 10 %"] = reached, reached < 0.3
    small = document["small"]
    reached = small["clones"]["first prefetch"]
    newer[f"a first prefetch of {small['tensors']:,} tensors in 10 clones"] = reached, reached > 10
    rows = [[target, f"{row['measured']} ({row['date']})"] for target, row in earlier.items() if target not in newer]
    rows += [[target, number(reached)] for target, (reached, missed) in newer.items() if missed]
    loadings = {
        ENGINES[name]: row["rows"]["first"]["engine of own"] for name, row in by_engine(document, "names").items()
    }
    if over := [f"{name} {number(reached)}" for name, reached in loadings.items() if reached > 1]:
        rows.append(["a first update of 37,000 names within one loading of the engine's own", ", ".join(over)])
    return table(["target", "measured"], rows)


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


WIDTH = 520  # at 400 pixels, letters of 15 still have 11


def bits_plot(document: Row) -> str:
    """Bits per changed element of each layout, by how much one step of AdamW changes."""
    found = by_density(document)
    most = max((row["bits_per_changed"] for rows in found.values() for row in rows.values()), default=1.0)
    body, y = [text(16, 26, "Bits per changed element in bfloat16", "title")], 34
    for density, rows in found.items():
        body.append(text(16, y + 16, f"{percent(density)} changed by a step", "head"))
        y += 24
        for row in sorted(rows.values(), key=lambda row: row["bits_per_changed"]):
            length = 270 * row["bits_per_changed"] / most
            body += [
                text(178, y + 13, NAMES[row["name"]], "end"),
                bar(188, y, length, "ours" if row["ours"] else "theirs"),
            ]
            body.append(text(196 + length, y + 13, number(row["bits_per_changed"]), "head" if row["ours"] else ""))
            y += 21
        y += 8
    return svg(WIDTH, y + 4, "Bits per changed element of every layout", body)


def pause_plot(document: Row) -> str:
    """Bytes and pause of one update, ours beside the alternatives, in one engine of each make."""
    known = {(row["server"], row["name"]): row for row in part(document, "engine") if "error" not in row}
    record = document["peers"]
    groups = {
        make: [(label, known[make, name]) for name, label in labels.items() if (make, name) in known]
        for make, labels in PLOTTED.items()
    }
    shown = [row for rows in groups.values() for _, row in rows]
    most = {key: max((row[key] for row in shown), default=1.0) for key in ("bytes", "pause_s")}
    body, y = [text(178, 26, "bytes sent", "head"), text(345, 26, "engine paused", "head")], 30
    for make, rows in groups.items():
        body.append(text(16, y + 16, f"{ENGINES[make]} {record['versions'].get(make, '')}", "title"))
        y += 26
        for label, row in rows:
            kind = "ours" if row["ours"] else "theirs"
            body.append(text(168, y + 13, label, "end"))
            for x, key, words in ((178, "bytes", size_of(row["bytes"])), (345, "pause_s", pause_of(row))):
                length = 95 * row[key] / most[key]
                body += [bar(x, y, length, kind), text(x + 8 + length, y + 13, words, "small")]
            y += 22
        y += 8
    model = record["model"]
    words = f"{model['parameters'] / 1e6:.3g} M bfloat16 parameters, {100 * model['density']:.1f} % changed"
    where = f"{record['machine']['cores']} CPU cores for all, {record['date']}; shorter is better"
    blue = (
        f'<tspan class="ours">\u25a0</tspan> torchrl_ext &#160; <tspan class="theirs">\u25a0</tspan> by hand; {words}'
    )
    body += [f'<text class="small" x="16" y="{y + 12}">{blue}</text>', text(16, y + 30, where, "small")]
    return svg(WIDTH, y + 42, "Bytes and pause of one update, beside the alternatives", body)


TABLES = {
    "run": described,
    "engines": engines,
    "bits": bits,
    "gaps": gaps,
    "names": names,
    "others": others,
    "misses": misses,
}
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
