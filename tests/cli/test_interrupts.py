"""Signals that arrive while an update runs."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_ext.cli.frame import Interrupts

SIGNALS = st.sampled_from([signal.SIGINT, signal.SIGTERM])


@given(during=st.lists(SIGNALS, max_size=3), between=st.lists(SIGNALS, max_size=1), ignored=st.booleans())
def test_first_signal_waits_for_the_update_but_a_second_does_not(during, between, ignored):
    before, steps = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)], []
    try:
        with Interrupts() as interrupts:
            if ignored:
                interrupts.ignore()
            with interrupts.deferred("the update"):
                for number in during:
                    signal.raise_signal(number)
                steps.append("updated")
            steps.append("next")
            for number in between:
                signal.raise_signal(number)
            steps.append("after")
    except KeyboardInterrupt:
        steps.append("interrupted")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    if ignored or not (during or between):
        assert steps == ["updated", "next", "after"]
    elif during:
        assert steps == (["updated", "interrupted"] if len(during) == 1 else ["interrupted"])
    else:
        assert steps == ["updated", "next", "interrupted"]


def test_an_error_of_the_update_comes_before_the_interrupt(capsys):
    with Interrupts() as interrupts, pytest.raises(ValueError, match="lost"), interrupts.deferred("the update"):
        signal.raise_signal(signal.SIGINT)
        raise ValueError("lost")
    assert "the update" in capsys.readouterr().err
