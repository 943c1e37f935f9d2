"""`Health`: who hears of complaints, where, and what is kept of them."""

from __future__ import annotations

import threading
from queue import Queue

from tests.processes import WAIT_S
from torchrl_ext.errors import EngineError
from torchrl_ext.rpc import connections
from torchrl_ext.rpc.health import Health


def test_nobody_is_called_on_an_event_loop():
    health, heard = Health(), Queue()
    health.subscribe(lambda url, why: heard.put((url, why is None, threading.current_thread())))

    async def complain():
        health.fail("e", EngineError("it hangs"), by="requests")
        health.mend("e", by="requests")
        return threading.current_thread()

    there = connections.run(complain())
    told = [heard.get(timeout=WAIT_S) for _ in range(2)]
    assert {(url, well) for url, well, _ in told} == {("e", False), ("e", True)}
    assert there not in [thread for _, _, thread in told]


def test_addresses_of_which_nobody_complains_are_not_kept():
    health = Health()
    health.fail("passing", EngineError("it was busy"), by="requests", for_s=0.0)
    health.fail("mended", EngineError("it hangs"), by="pool")
    health.mend("mended", by="pool")
    health.fail("lost", EngineError("it is lost"), by="pool")
    assert health.why("asked") is None
    health.mend("well", by="pool")
    assert health._complaints.keys() == {"lost"}
