"""Writes the results of `test_kinds` and `test_conformance` into docs/compatibility.md.

    python -m pytest --engines --exhaustive tests/real_engines/test_kinds.py --kind-results results.jsonl
    python -m tests.real_engines.compatibility results.jsonl
    python -m pytest --engines --exhaustive tests/real_engines/test_conformance.py --kit-results kit.jsonl
    python -m tests.real_engines.compatibility --kit kit.jsonl

Each run of a cell or a case added one line to the file; the last one counts. Cells without any are told as not run.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.real_engines.cells import CELLS, Cell

__all__ = ["kinds_table", "kit_table", "write_between"]

BEGIN, END = "<!-- kinds: begin -->", "<!-- kinds: end -->"
KIT = ("<!-- kit: begin -->", "<!-- kit: end -->")
_PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
_HEAD = ("| engine | kind | as | outcome | gaps | repairs, or reason |", "|---|---|---|---|---|---|")
_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
_STEP = ".process_weights_after_loading"
_KEY = ("engine", "kind", "parallel", "quantisation", "dtype")


def kinds_table(results: Iterable[Mapping]) -> str:
    """Markdown, with a row per cell in the order of `CELLS`; of cells that say no, it has the reason.

    Args:
        results: the lines that tests noted, older ones first.
    """
    latest = {tuple(result[field] for field in _KEY): result for result in results}
    rows = [_row(cell, latest.get(tuple(getattr(cell, field) for field in _KEY), {})) for cell in CELLS]
    return "\n".join((*_HEAD, *rows)) + "\n"


def kit_table(results: Iterable[Mapping]) -> str:
    """Markdown, with a row per case of the kit and a column per engine and transport, and the reasons below.

    Args:
        results: the lines that the kit noted, older ones first.
    """
    cells, columns, promises = {}, {}, {}
    for row in results:
        stock = "stock " if row["plugin"] == "stock" else ""
        column = f"{stock}{_NAMES.get(row['kind'], row['kind'])} {row['release']}, {row['transport']}"
        model = f"{row['model']}{', tied' if row.get('tied') else ''}"
        _, _, which = row["case"].partition("[")
        promises[row["case"]] = row["promise"].rstrip(".") + (f" ({which.rstrip(']')})" if which else "")
        columns.setdefault(column, {})[model] = None
        cells[row["case"], column, model] = row
    if not promises:
        return "No engine was judged yet.\n"
    reasons: dict[str, int] = {}
    head = (f"| case | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|")
    rows = []
    for case, promise in promises.items():
        told = (_kit_cell({m: cells[case, c, m] for m in ms if (case, c, m) in cells}, reasons)
                for c, ms in columns.items())  # fmt: skip
        rows.append(f"| {promise} | {' | '.join(told)} |")
    below = (f"{number}. {reason}" for reason, number in reasons.items())
    return "\n".join((*head, *rows, "", *below)) + "\n"


def _kit_cell(found: Mapping[str, Mapping], reasons: dict[str, int]) -> str:
    """The outcome of a case, by model where models differ; reasons of failures and refusals get numbers."""
    told = {}
    for model, row in found.items():
        mark = ""
        if row["outcome"] in ("failed", "refused"):
            reason = re.sub(r"http://\S+?:\d+\S*", "the engine", row["reason"]).replace("|", "\\|")
            mark = f" ({reasons.setdefault(reason, len(reasons) + 1)})"
        told[model] = row["outcome"] + mark
    if len(set(told.values())) <= 1:
        return next(iter(told.values()), "not run")
    return ", ".join(f"{model}: {outcome}" for model, outcome in told.items())


def write_between(text: str, page: str, begin_mark: str = BEGIN, end_mark: str = END) -> str:
    """``page`` with ``text`` between the two marks.

    Raises:
        ValueError: it has not both.
    """
    before, begin, rest = page.partition(begin_mark)
    _, end, after = rest.partition(end_mark)
    if not (begin and end):
        raise ValueError(f"the page has no {begin_mark} and {end_mark}")
    return f"{before}{begin}\n\n{text}\n{end}{after}"


def _row(cell: Cell, found: Mapping) -> str:
    found = {} if cell.does_not_start else found
    outcome = "does not start" if cell.does_not_start else found.get("outcome", "not run")
    outcome = ", ".join(filter(None, (outcome, found.get("proof", ""))))
    engine = _NAMES[cell.engine] + (f" {found['version']}" if found else "")
    gaps = (f"{found[field]:.1e}" for field in ("gap_cold", "gap_after", "as_cold") if field in found)
    workers = "one worker" if cell.parallel == "1" else cell.parallel
    form = f"{cell.quantisation} of {cell.dtype}" if cell.quantisation else cell.dtype
    repairs = ", ".join(name.removesuffix(_STEP) for name in found.get("repairs", ()))
    why = (cell.does_not_start or found.get("reason", "") or repairs).replace("|", "\\|")
    columns = (engine, cell.kind, f"{workers}, {form}", outcome, ", ".join(gaps).replace("0.0e+00", "0"), why)
    return f"| {' | '.join(columns)} |"


def main(argv: list[str] | None = None) -> None:
    """Rewrite the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.real_engines.compatibility", description=__doc__)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("results", nargs="?", type=Path, help="what --kind-results wrote")
    given.add_argument("--kit", type=Path, help="what --kit-results wrote")
    parser.add_argument("--page", type=Path, default=_PAGE, help="the page to rewrite")
    chosen = parser.parse_args(argv)
    lines = (chosen.kit or chosen.results).read_text().splitlines()
    make, marks = (kit_table, KIT) if chosen.kit else (kinds_table, (BEGIN, END))
    table = make(json.loads(line) for line in lines if line)
    chosen.page.write_text(write_between(table, chosen.page.read_text(), *marks))


if __name__ == "__main__":
    main()
