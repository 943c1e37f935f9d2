"""Every Python block of the documentation runs as it is printed; `tests.pages` says what for."""

from contextlib import ExitStack

import pytest

from tests.embedded import EmbeddedServer
from tests.models import tiny_checkpoint
from tests.pages import PAGES, ROOT, blocks
from tests.processes import python

RUN = [page for page in PAGES if any(block.runs for block in blocks(page))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def urls(checkpoint):
    with ExitStack() as ends:
        yield [ends.enter_context(EmbeddedServer(checkpoint, dtype="float32", threads=1)).url for _ in range(3)]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_as_they_are_printed(page, urls, checkpoint):
    python(
        "import sys; from tests.pages import run; run(sys.argv[1], sys.argv[3:], sys.argv[2])", page, checkpoint, *urls
    )


def test_every_block_is_python_and_says_why_it_is_not_run():
    told = {}
    for page in PAGES:
        for block in blocks(page):
            compile(block.code, str(page), "exec", flags=0x2000)  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            told.setdefault(block.mark, []).append(f"{page.relative_to(ROOT)}:{block.line}")
    run = told.pop("") + told.pop("run beside the next")
    assert all(mark.startswith("not run: ") for mark in told), told
    assert len(run) > 2 * sum(map(len, told.values()))
