"""The table of kinds is written from what tests noted, and says what was not run."""

import json
import re

from tests.real_engines.cells import CELLS
from tests.real_engines.compatibility import BEGIN, END, kinds_table, main

RESULT = {
    "engine": "vllm",
    "kind": "mixtral",
    "version": "0.32.0",
    "parallel": "1",
    "quantisation": "",
    "dtype": "float32",
    "outcome": "proved",
    "proof": "rehearsed",
    "gap_cold": 1e-5,
    "gap_after": 2e-5,
    "as_cold": 0.0,
    "repairs": ["a step", "experts.process_weights_after_loading"],
}


def test_every_cell_has_a_row_and_says_not_run_without_results():
    rows = [line for line in kinds_table([]).splitlines() if re.match(r"\| (vLLM|SGLang)", line)]
    assert len(rows) == len(CELLS)
    assert all("not run" in row for row in rows) and len({cell.name for cell in CELLS}) == len(CELLS)


def test_last_result_counts_and_refusals_show_reasons(tmp_path):
    table = kinds_table([{**RESULT, "outcome": "failed"}, RESULT])
    row = "| vLLM 0.32.0 | mixtral | one worker, float32 | {}, rehearsed | 1.0e-05, 2.0e-05, 0 | {} |"
    assert row.format("proved", "a step, experts") in table and "failed" not in table
    table = kinds_table([{**RESULT, "outcome": "refused", "reason": "it cannot", "repairs": []}])
    assert row.format("refused", "it cannot") in table
    page, results = tmp_path / "page.md", tmp_path / "results.jsonl"
    page.write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    results.write_text(json.dumps({**RESULT, "outcome": "refused", "reason": "it cannot", "repairs": []}) + "\n")
    main([str(results), "--page", str(page)])
    assert page.read_text() == f"before\n{BEGIN}\n\n{table}\n{END}\nafter\n"
