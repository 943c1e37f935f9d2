"""Engines started by one call, and ended by one."""

import pytest

import torchrl_ext as tx
from tests.processes import python
from torchrl_ext.base.errors import ConfigError
from torchrl_ext.testing.tiny import make_tiny_lm


def test_engines_serve_in_the_block_and_end_with_it():
    running = tx.testing.engines(2)
    with pytest.raises(ZeroDivisionError), running as (a, b):
        assert [info.kind for info in tx.discover(a, b)] == ["embedded", "embedded"] and a != b
        assert running.model.is_dir() and all(process.alive() for process in running.processes)
        _ = 1 / 0
    assert not any(process.alive() for process in running.processes) and not running.model.exists()
    running.close()


def test_only_these_engines_end_and_a_model_of_ones_own_stays(tmp_path):
    model_dir = make_tiny_lm(tmp_path / "model")
    with tx.testing.engines(model=model_dir, threads=1) as (kept,):
        other = tx.testing.engines(model=model_dir, threads=1)
        other.close()
        assert model_dir.is_dir() and not other.processes[0].alive()
        assert tx.discover(kept)[0].model == str(model_dir)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kind": "vlm"}, r"no engine called 'vlm'.*did you mean 'vllm'"),
        ({"kind": "inprocess"}, "have no server"),
        ({"n": 0}, "1 or more"),
        ({"swap_space": 4}, "no setting swap_space"),
        ({"model": "nowhere"}, "nowhere is not a directory"),
    ],
)
def test_what_cannot_be_started_is_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        tx.testing.engines(**wrong)


def test_it_needs_no_pytest():
    python(
        "import sys; sys.modules['pytest'] = None\n"
        "import torchrl_ext as tx; assert callable(tx.testing.engines), tx.testing",
        fresh=True,
    )
