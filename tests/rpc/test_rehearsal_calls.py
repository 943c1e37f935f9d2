"""What a client of vLLM's routes calls when an engine has something to show, and what it leaves alone when not."""

import pytest

from tests.rpc.servers import bare, rehearsing, running
from torchrl_ext.errors import EngineRefusedError
from torchrl_ext.rpc.makes.vllm import vllm_engine
from torchrl_ext.rpc.pool import Pool

INIT = "POST /init_weight_transfer_engine"


def changes(server):
    return [call for call in server.routes() if call.startswith("POST")]


def rehearsal(how="once", **answers):
    """The client, and what it called between a connection and an update."""
    with running(post_init_weight_transfer_engine=rehearsing(**answers)) as server:
        engine = vllm_engine(server.url, timeout_s=5)
        failure = None
        try:
            engine.rehearse(how)
        except EngineRefusedError as error:
            failure = error
        calls = [call for call in changes(server) if not call.endswith("/generate")]
        asked = [bare(body["init_info"]) for call, _, body in server.calls if call == INIT]
        engine.close()
    return engine, failure, calls, asked


def test_an_engine_is_paused_for_it_and_proves_the_least_of_its_workers():
    engine, failure, calls, asked = rehearsal()
    assert failure is None and calls == [INIT, "POST /pause", INIT, INIT, "POST /resume"]
    rehearsals = [{"kind": "rehearse", "how": "once", "ask": ask} for ask in (True, False)]
    assert asked == [*rehearsals, {"kind": "state"}]  # it resumes nothing that is not whole
    assert engine.proof == "in place" and [told["worker"] for told in engine.rehearsed] == [0, 1]
    assert engine.rows()[0].state == "serving" and engine.rows()[0].proof == "in place"


def test_one_that_has_nothing_to_show_is_not_paused():
    engine, _, calls, asked = rehearsal("always", needed=False)
    assert (
        calls == [INIT] and asked == [{"kind": "rehearse", "how": "always", "ask": True}] and engine.proof == "in place"
    )


@pytest.mark.parametrize(("restored", "state"), [(True, "serving"), (False, "paused")])
def test_one_that_refuses_serves_again_only_where_it_was_brought_back(restored, state):
    engine, failure, calls, _ = rehearsal(refused=True, restored=restored)
    assert "layer.0 (Experts)" in failure.what and engine.rows()[0].state == state
    assert ("POST /resume" in calls) == restored and engine.proof == "sent"


def test_one_whose_plugin_knows_no_rehearsals_proves_what_it_was_handed():
    with running() as server:
        engine = vllm_engine(server.url, timeout_s=5)
        engine.rehearse()
        assert engine.proof == "sent" and changes(server) == [INIT]
        engine.close()


def test_a_fleet_proves_the_least_of_its_engines():
    with running(post_init_weight_transfer_engine=rehearsing()) as one, running() as other:
        fleet = Pool([vllm_engine(server.url, timeout_s=5) for server in (one, other)])
        fleet.members()
        fleet.rehearse()
        assert fleet.proof == "sent" and {row.proof for row in fleet.rows()} == {"sent", "in place"}
        fleet.close()
