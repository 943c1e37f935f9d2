"""Each call of transport and engine fails in turn: what the caller hears, what the engine serves, and what follows."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.sync.ends import made
from tests.sync.life import BEFORE_THE_PAUSE, IN_THE_PAUSE, MOMENTS, Trained, TransportLife
from torchrl_ext.base.errors import EngineRefusedError, UpdateError


def fails(trained, step, moment, error=RuntimeError):
    """Fail an update at a step; see who hears what of it, and that whatever the engine may serve is one version."""
    before, version = {name: tensor.clone() for name, tensor in trained.served.items()}, trained.row[1]
    accepted = trained.sender.version
    trained.fault.arm(step, moment, error)
    with pytest.raises(UpdateError if error is RuntimeError else error) as told:
        trained.update("a", "b")
    assert trained.sender.version == accepted
    if error is RuntimeError:
        number = told.value.report.version
        assert number > accepted and not told.value.report.verified
        what = "the weights" if step in ("open", "join") else f"weights version {number}"  # numbered from then on
        assert told.value.what.startswith(f"RuntimeError: the {step} broke; {what} did not reach every engine")
        assert str(told.value).count("State:") == 1 and isinstance(told.value.__cause__, RuntimeError)
        assert told.value.rows[0].state == trained.row[0]
    if step in (*BEFORE_THE_PAUSE, "start"):
        assert trained.row == ("serving", version) and trained.serves(before)
        return
    assert trained.row[0] == "paused"
    try:
        trained.engine.resume()
    except EngineRefusedError:
        assert trained.row[0] == "paused"
    else:
        assert trained.serves(before) or (step, moment) == ("finish", "after")


def recovers(trained):
    """The next update is sent whole, whatever was asked for, and parts are sent from then on, if they can be."""
    report = trained.update("a", "b", only="b")
    assert not report.part and report.verified and trained.serves(trained.policy)
    assert trained.row == ("serving", report.version) and report.version == trained.sender.version
    report = trained.update("b", only="b")
    assert report.part == trained.parts and report.verified and trained.serves(trained.policy)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("step", [*BEFORE_THE_PAUSE, *IN_THE_PAUSE])
@pytest.mark.parametrize("name", ["memory", "delta"])
def test_failing_step_leaves_one_version_in_service(name, step, moment, tmp_path):
    trained = Trained(made(name, tmp_path))
    if (name, step) == ("delta", "verify"):
        return  # its digests travel with the weights
    for error in (RuntimeError, KeyboardInterrupt):  # in a first update, and in one after others
        fails(trained, step, moment, error)
        recovers(trained)
        if step in ("open", "join"):
            fails(trained, "prepare", "before")  # after which engines join anew
    trained.sender.shutdown()


@pytest.mark.parametrize("moment", MOMENTS)
def test_failure_after_a_version_is_in_service_is_only_logged(moment, tmp_path, caplog):
    trained = Trained(made("delta", tmp_path))
    for _ in range(2):
        trained.fault.arm("served", moment, OSError)
        report = trained.update("a", "b")
        assert report.verified and trained.row == ("serving", report.version) and trained.serves(trained.policy)
        assert f"version {report.version} is in service" in caplog.text and "the served broke" in caplog.text
        caplog.clear()
        assert trained.update("b", only="b").part == trained.parts and trained.serves(trained.policy)
    trained.sender.shutdown()


def life(name, examples):
    """The test case of a transport's life."""
    found = type(f"{name.title()}Life", (TransportLife,), {"make_trainer": lambda self, folder: made(name, folder)})
    found.TestCase.settings = settings(
        max_examples=examples,
        stateful_step_count=20,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    return found.TestCase


TestMemoryLife, TestDiskLife, TestDeltaLife = (life(name, 10) for name in ("memory", "disk", "delta"))
TestIpcLife, TestCollectiveLife, TestShardedLife = (life(name, 4) for name in ("ipc", "collective", "sharded"))
