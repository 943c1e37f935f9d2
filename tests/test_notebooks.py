"""Notebooks are stored with outputs that can be shown; `.ci/run` executes them."""

import pytest

from tests.notebooks import NOTEBOOKS, PLOTS, ROOT, cells, faults, plots


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_can_be_shown_and_the_gallery_has_the_plot(path):
    assert not faults(path)
    assert (PLOTS / f"{path.stem}.png").read_bytes() == plots(path)[0]
    gallery = (ROOT / "docs" / "quickstart.md").read_text()
    title = cells(path, "markdown")[0]["source"][0].strip("# \n")
    assert f"[{title}](../tutorials/{path.name})" in gallery
    assert f"(img/tutorials/{path.stem}.png)" in gallery
