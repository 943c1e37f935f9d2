"""Signals that arrive while an update runs."""

import signal

import pytest

from torchrl_ext.cli.interrupts import Interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_an_update_waits_for_its_end(number, capsys):
    steps = []
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        with interrupts.deferred("the update"):
            signal.raise_signal(number)
            steps.append("the update went on")
        steps.append("and was followed by more")
    assert steps == ["the update went on"]
    assert "finishing the update" in capsys.readouterr().err


def test_a_second_signal_does_not_wait():
    steps = []
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt), interrupts.deferred("the update"):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        steps.append("the update went on")
    assert steps == []


def test_an_error_of_the_update_comes_before_the_interrupt():
    with Interrupts() as interrupts, pytest.raises(ValueError, match="lost"), interrupts.deferred("the update"):
        signal.raise_signal(signal.SIGINT)
        raise ValueError("lost")


def test_a_signal_between_updates_interrupts_at_once_and_old_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        with interrupts.deferred("the update"):
            pass
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
