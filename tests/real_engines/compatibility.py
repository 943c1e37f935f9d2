"""Writes the results of `test_kinds` into docs/compatibility.md.

    python -m pytest --engines --exhaustive tests/real_engines/test_kinds.py --kind-results results.jsonl
    python -m tests.real_engines.compatibility results.jsonl

Each run of a cell added one line to the file; the last one counts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.processes import ROOT
from tests.real_engines.cells import CELLS

BEGIN, END = "<!-- kinds: begin -->", "<!-- kinds: end -->"
PAGE = ROOT / "docs" / "compatibility.md"
HEAD = ("| engine | kind | as | outcome | gaps | repairs, or reason |", "|---|---|---|---|---|---|")
NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


def row(cell, found):
    """A row of Markdown; of a cell that says no, it has the reason."""
    outcome = ", ".join(filter(None, (found.get("outcome", "not run"), found.get("proof", ""))))
    engine = NAMES[cell.engine] + (f" {found['version']}" if found else "")
    gaps = (f"{found[field]:.1e}" for field in ("gap_cold", "gap_after", "as_cold") if field in found)
    workers = "one worker" if cell.parallel == "1" else cell.parallel
    form = f"{cell.quantisation} of {cell.dtype}" if cell.quantisation else cell.dtype
    repairs = ", ".join(name.removesuffix(".process_weights_after_loading") for name in found.get("repairs", ()))
    why = (found.get("reason", "") or repairs).replace("|", "\\|")
    columns = (engine, cell.kind, f"{workers}, {form}", outcome, ", ".join(gaps).replace("0.0e+00", "0"), why)
    return f"| {' | '.join(columns)} |"


if __name__ == "__main__":
    results = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    latest = {result["cell"]: result for result in results}
    table = "\n".join((*HEAD, *(row(cell, latest.get(cell.name, {})) for cell in CELLS)))
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    PAGE.write_text(f"{before}{begin}\n\n{table}\n\n{end}{after}")
