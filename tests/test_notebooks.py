"""Notebooks are stored with outputs that can be shown; `.ci/run` executes them."""

import pytest

from tests.notebooks import NOTEBOOKS, PLOTS, ROOT, cells, faults, plots


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_can_be_shown(path):
    assert not faults(path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_gallery_shows_the_first_plot(path):
    assert (PLOTS / f"{path.stem}.png").read_bytes() == plots(path)[0]
    gallery = (ROOT / "docs" / "tutorials.md").read_text()
    title = cells(path, "markdown")[0]["source"][0].strip("# \n")
    assert f"[{title}](../tutorials/{path.name})" in gallery
    assert f"(img/tutorials/{path.stem}.png)" in gallery
