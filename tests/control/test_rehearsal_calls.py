"""What a client calls when an engine has something to show, and what it leaves alone when not."""

from contextlib import nullcontext

import pytest

from tests.control.servers import rehearsing, running
from torchrl_ext.base.errors import EngineRefusedError
from torchrl_ext.control.fleet import Fleet
from torchrl_ext.control.makes.vllm import vllm_engine

ASK, PAUSE, RESUME = "rehearse", "POST /pause", "POST /resume"


def changes(server):
    names = [call.kind or call.route for call in server.calls]
    return [name for name in names if name in (ASK, PAUSE, RESUME)]


@pytest.mark.parametrize(
    ("script", "calls", "proof"),
    [
        ({}, [ASK, PAUSE, ASK, RESUME], "in place"),
        ({"needed": False}, [ASK], "in place"),
        ({"refused": True}, [ASK, PAUSE, ASK, ASK, RESUME], "sent"),
        ({"refused": True, "restored": False}, [ASK, PAUSE, ASK, ASK], "sent"),
    ],
)
def test_rehearsal_pauses_only_if_needed_and_resumes_if_whole(script, calls, proof):
    refused = pytest.raises(EngineRefusedError, match=r"layer.0 \(Experts\)") if "refused" in script else nullcontext()
    with running(post_collective_rpc=rehearsing(**script)) as server:
        engine = vllm_engine(server.url, timeout_s=5)
        with refused:
            assert engine.rehearse() == proof  # the least of its workers
        assert changes(server) == calls
        assert [told["worker"] for told in engine.rehearsed] == ([] if "refused" in script else [0, 1])


def test_fleet_proof_is_the_weakest_proof_of_its_engines():
    with running(post_collective_rpc=rehearsing()) as one, running() as other:
        fleet = Fleet([vllm_engine(server.url, timeout_s=5) for server in (one, other)])
        assert fleet.rehearse() == "sent"
        assert [engine.update(1).rows()[0].proof for engine in fleet.engines] == ["in place", "sent"]
        assert changes(other) == [ASK]
