"""Writes what came out of `tests.engine.test_kinds` into docs/compatibility.md.

    python -m pytest --engines --exhaustive tests/engine/test_kinds.py --kind-results results.jsonl
    python -m tests.engine.compatibility results.jsonl

Each run of a cell added one line to the file; the last one counts. Cells without any are told as not run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.engine.cells import CELLS, Cell

__all__ = ["kinds_table", "write_between"]

BEGIN, END = "<!-- kinds: begin -->", "<!-- kinds: end -->"
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


def write_between(text: str, page: str) -> str:
    """``page`` with ``text`` between the two marks.

    Raises:
        ValueError: it has not both.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no {BEGIN} and {END}")
    return f"{before}{begin}\n\n{text}\n{end}{after}"


def _row(cell: Cell, found: Mapping) -> str:
    found = {} if cell.does_not_start else found
    outcome = "does not start" if cell.does_not_start else found.get("outcome", "not run")
    outcome = ", ".join(filter(None, (outcome, found.get("proof", ""))))
    engine = _NAMES[cell.engine] + (f" {found['version']}" if found else "")
    gaps = ", ".join(filter(None, (_gap(found, field) for field in ("gap_cold", "gap_after", "as_cold"))))
    repairs = ", ".join(name.removesuffix(_STEP) for name in found.get("repairs", ()))
    why = (cell.does_not_start or found.get("reason", "") or repairs).replace("|", "\\|")
    columns = (engine, cell.kind, f"{_workers(cell)}, {_form(cell)}", outcome, gaps, why)
    return f"| {' | '.join(columns)} |"


def _workers(cell: Cell) -> str:
    return "one worker" if cell.parallel == "1" else cell.parallel


def _form(cell: Cell) -> str:
    return f"{cell.quantisation} of {cell.dtype}" if cell.quantisation else cell.dtype


def _gap(found: Mapping, field: str) -> str:
    return f"{found[field]:.1e}".replace("0.0e+00", "0") if field in found else ""


def main(argv: list[str] | None = None) -> None:
    """Rewrite the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.compatibility", description=__doc__)
    parser.add_argument("results", type=Path, help="what --kind-results wrote")
    parser.add_argument("--page", type=Path, default=_PAGE, help="the page to rewrite")
    chosen = parser.parse_args(argv)
    lines = chosen.results.read_text().splitlines()
    table = kinds_table(json.loads(line) for line in lines if line)
    chosen.page.write_text(write_between(table, chosen.page.read_text()))


if __name__ == "__main__":
    main()
