"""The table of kinds is written from what tests noted, and says what was not run."""

import pytest

from tests.engine.cells import CELLS
from tests.engine.compatibility import BEGIN, END, kinds_table, main, write_between

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
    "repairs": ["a step"],
}


def rows(table):
    return [line for line in table.splitlines() if line.startswith("| vLLM") or line.startswith("| SGLang")]


def test_every_cell_has_a_row_and_those_without_results_were_not_run():
    table = rows(kinds_table([]))
    assert len(table) == len(CELLS)
    assert sum("not run" in row for row in table) == sum(not cell.does_not_start for cell in CELLS)


def test_the_last_result_of_a_cell_counts():
    table = kinds_table([{**RESULT, "outcome": "failed"}, RESULT])
    expected = "| vLLM 0.32.0 | mixtral | one worker | float32 | proved | rehearsed | 1.0e-05 | 2.0e-05 | 0 | a step |"
    assert expected in table and "failed" not in table


def test_refusals_are_told_with_their_reasons():
    refused = {**RESULT, "outcome": "refused", "reason": "it cannot", "repairs": []}
    assert "* vLLM, mixtral, one worker, float32: it cannot." in kinds_table([refused])


def test_nothing_but_what_is_between_the_marks_is_written(tmp_path):
    page, results = tmp_path / "page.md", tmp_path / "results.jsonl"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    results.write_text("")
    main([str(results), "--page", str(page)])
    assert page.read_text() == f"before\n{BEGIN}\n\n{kinds_table([])}\n{END}\nafter\n"
    with pytest.raises(ValueError, match="the page has no"):
        write_between("", "a page without marks")


def test_no_two_cells_have_one_name():
    starting = [cell.name for cell in CELLS if not cell.does_not_start]
    assert len(set(starting)) == len(starting)
