"""The table of kinds is written from what tests noted, and says what was not run."""

import json
import re

from tests.real_engines.cells import CELLS
from tests.real_engines.compatibility import KIT, kinds_table, kit_table, main

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
    assert sum("not run" in row for row in rows) == sum(not cell.does_not_start for cell in CELLS)
    starting = [cell.name for cell in CELLS if not cell.does_not_start]
    assert len(set(starting)) == len(starting)


def test_last_result_of_a_cell_counts_and_refusals_show_reasons():
    table = kinds_table([{**RESULT, "outcome": "failed"}, RESULT])
    row = "| vLLM 0.32.0 | mixtral | one worker, float32 | {}, rehearsed | 1.0e-05, 2.0e-05, 0 | {} |"
    assert row.format("proved", "a step, experts") in table and "failed" not in table
    table = kinds_table([{**RESULT, "outcome": "refused", "reason": "it cannot", "repairs": []}])
    assert row.format("refused", "it cannot") in table


def kit_row(**changes):
    row = {"kind": "vllm", "release": "0.32.0", "plugin": "stock", "transport": "disk", "model": "qwen3"}
    row |= {"case": "test_sleep[1]", "promise": "It wakes.", "outcome": "passed", "reason": ""}
    return {**row, **changes}


def test_kit_table_separates_models_and_numbers_the_reasons(tmp_path):
    failed = {"outcome": "failed", "reason": "http://127.0.0.1:8000/x is | off"}
    rows = [kit_row(**failed), kit_row(), kit_row(model="qwen3_moe", **failed), kit_row(kind="sglang", plugin="plugin")]
    rows.append(kit_row(case="test_other", promise="Other.", **failed))
    table = kit_table(rows)
    assert kit_table([]) == "No engine was judged yet.\n"
    assert "| case | stock vLLM 0.32.0, disk | SGLang 0.32.0, disk |" in table
    assert "| It wakes (1) | qwen3: passed, qwen3_moe: failed (1) | passed |" in table
    assert "| Other | failed (1) | not run |" in table and "1. the engine is \\| off" in table
    page, results = tmp_path / "page.md", tmp_path / "kit.jsonl"
    page.write_text(f"before\n{KIT[0]}\n{KIT[1]}\nafter\n")
    results.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    main(["--kit", str(results), "--page", str(page)])
    assert page.read_text() == f"before\n{KIT[0]}\n\n{table}\n{KIT[1]}\nafter\n"
