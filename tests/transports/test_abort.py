"""An abort ends who waits for a version, and nobody who comes later."""

import threading

import pytest

import torchrl_ext as tx
from tests.processes import WAIT_S
from torchrl_ext.errors import WeightSyncError
from torchrl_ext.transports import disk, shared_root
from torchrl_ext.transports.delta import carriers

MODULES = {"delta": carriers, "disk": disk}


@pytest.mark.parametrize("step", ["a version", "the trainer"])
@pytest.mark.parametrize("name", MODULES)
def test_an_abort_ends_the_wait_of_its_time_and_a_later_wait_neither_ends_nor_spins(tmp_path, monkeypatch, name, step):
    for module in (MODULES[name], shared_root):
        monkeypatch.setattr(module, "VISIBLE_S", 3 * WAIT_S)
    transport, trainer = (tx.make_transport(name, root=str(tmp_path), timeout_s=3 * WAIT_S) for _ in range(2))
    info = trainer.open(1, ()).info
    trainer.shutdown()
    looked, said = threading.Event(), []

    def wait():
        try:
            transport.prefetch(3) if step == "a version" else transport.join(info)
        except WeightSyncError as error:
            said.append(str(error))

    pauses = transport._aborted.wait
    monkeypatch.setattr(transport._aborted, "wait", lambda seconds: (looked.set(), pauses(seconds))[1])
    transport.abort()  # of an earlier update
    for count in (1, 2):
        looked.clear()
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        assert looked.wait(WAIT_S) and waiting.is_alive() and not transport._aborted.is_set()
        transport.abort()
        waiting.join(WAIT_S)
        words = ("weight_v000003", "version 3") if step == "a version" else ("joining the trainer was aborted",)
        assert len(said) == count and any(one in said[-1] for one in words)
    transport.shutdown()
