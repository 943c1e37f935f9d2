"""An abort ends who waits for a version, and nobody who comes later."""

import threading

import pytest

import torchrl_ext as tx
from tests.processes import WAIT_S
from torchrl_ext.errors import StoreError
from torchrl_ext.transports import disk
from torchrl_ext.transports.delta import carriers

MODULES = {"delta": carriers, "disk": disk}


@pytest.mark.parametrize("name", MODULES)
def test_an_abort_ends_the_wait_for_a_version_and_a_later_one_neither_ends_nor_spins(tmp_path, monkeypatch, name):
    monkeypatch.setattr(MODULES[name], "VISIBLE_S", 3 * WAIT_S)
    transport = tx.make_transport(name, root=str(tmp_path), timeout_s=3 * WAIT_S)
    looked, said = threading.Event(), []

    def wait():
        try:
            transport.prefetch(3)
        except StoreError as error:
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
        assert len(said) == count and ("weight_v000003" in said[-1] or "version 3" in said[-1])
    transport.shutdown()
