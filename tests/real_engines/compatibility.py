"""Writes the results of `test_kinds` into docs/compatibility.md.

    python -m pytest --engines --exhaustive tests/real_engines/test_kinds.py --kind-results results.jsonl
    python -m tests.real_engines.compatibility results.jsonl

Each run of a cell added one line to the file; the last one counts. Cells without any are told as not run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.real_engines.cells import CELLS, Cell

__all__ = ["kinds_table"]

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


def _row(cell: Cell, found: Mapping) -> str:
    outcome = found.get("outcome", "not run")
    outcome = ", ".join(filter(None, (outcome, found.get("proof", ""))))
    engine = _NAMES[cell.engine] + (f" {found['version']}" if found else "")
    gaps = (f"{found[field]:.1e}" for field in ("gap_cold", "gap_after", "as_cold") if field in found)
    workers = "one worker" if cell.parallel == "1" else cell.parallel
    form = f"{cell.quantisation} of {cell.dtype}" if cell.quantisation else cell.dtype
    repairs = ", ".join(name.removesuffix(_STEP) for name in found.get("repairs", ()))
    why = (found.get("reason", "") or repairs).replace("|", "\\|")
    columns = (engine, cell.kind, f"{workers}, {form}", outcome, ", ".join(gaps).replace("0.0e+00", "0"), why)
    return f"| {' | '.join(columns)} |"


def main(argv: list[str] | None = None) -> None:
    """Rewrite the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.real_engines.compatibility", description=__doc__)
    parser.add_argument("results", type=Path, help="what --kind-results wrote")
    parser.add_argument("--page", type=Path, default=_PAGE, help="the page to rewrite")
    chosen = parser.parse_args(argv)
    table = kinds_table(json.loads(line) for line in chosen.results.read_text().splitlines() if line)
    before, begin, rest = chosen.page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"the page has no {BEGIN} and {END}"
    chosen.page.write_text(f"{before}{begin}\n\n{table}\n{end}{after}")


if __name__ == "__main__":
    main()
