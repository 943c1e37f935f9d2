"""How `pytest` as typed shares its tests between two processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests import beside, conftest
from tests.processes import ROOT

WHOLE, PART = (pytest.Config.ArgsSource.TESTPATHS, pytest.Config.ArgsSource.ARGS)


def asked(source=WHOLE, **options):
    """What is left of the options ``-n`` and ``--dist``."""
    plain = {"engines": False, "markexpr": "", "keyword": "", "usepdb": False, "collectonly": False}
    option = SimpleNamespace(**{**plain, "numprocesses": None, "dist": "no", **options})
    plugins = SimpleNamespace(has_plugin=lambda name: True)
    conftest.pytest_cmdline_main(
        SimpleNamespace(option=option, args_source=source, ArgsSource=pytest.Config.ArgsSource, pluginmanager=plugins)
    )
    return option.numprocesses, option.dist


@pytest.fixture(autouse=True)
def _as_typed(monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)


def test_a_whole_tier_runs_in_two_processes_and_whole_files_stay_in_one():
    assert asked() == asked(exhaustive=True) == (2, "loadgroup")


@pytest.mark.parametrize(
    "options",
    [{"engines": True}, {"markexpr": "gpu"}, {"keyword": "pause"}, {"usepdb": True}, {"collectonly": True}],
    ids=lambda options: next(iter(options)),
)
def test_real_engines_and_what_is_chosen_run_in_one_process(options):
    assert asked(**options) == asked(PART) == (None, "no")


def test_who_names_a_number_gets_it():
    assert asked(numprocesses=0)[0] == 0 and asked(numprocesses=4) == asked(PART, numprocesses=4) == (4, "loadgroup")
    assert asked(numprocesses=4, dist="each") == (4, "each")


def test_a_process_of_the_two_starts_no_others(monkeypatch):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    assert asked() == (None, "no")


def test_files_that_the_tables_name_exist():
    named = {*beside.LONGEST, *beside.SHORT, *beside.RAY} - {"short deadlines", "Ray"}
    assert not [name for name in named if not (ROOT / "tests" / name).exists()]


def test_the_longest_files_begin_first_and_short_deadlines_never_run_beside_each_other():
    class Item(SimpleNamespace):
        def add_marker(self, mark):
            self.group = mark.args[0]

    short, other = sorted(beside.SHORT)[:2]
    paths = ["a/test_a.py", short, other, beside.LONGEST[0], "a/test_a.py"]
    items = [Item(path=ROOT / "tests" / path) for path in paths]
    beside.share(items)
    groups = [item.group for item in items]
    assert groups == [beside.LONGEST[0], "short deadlines", "short deadlines", "a/test_a.py", "a/test_a.py"]
