"""Clients for draft models over real sockets; what a real engine does is in tests/engine/test_draft.py."""

import logging
from copy import deepcopy

import pytest
import torch

import torchrl_ext as tx
from tests.fakes import FakeEngine
from tests.rpc.servers import CONFIG, GOOD, bare, failed, running
from torchrl_ext.errors import ConcurrentUpdateError, ConfigError, EngineRefusedError
from torchrl_ext.rpc.pool import Pool
from torchrl_ext.sync.connection import Connection

START = "POST /start_draft_weight_update"
JOIN = {"transport": "disk", "params": [], "root": "/root/d", "connection": "d"}


def speculating(method="eagle"):
    config = deepcopy(CONFIG) | {"speculative_config": {"method": method}}
    return {**GOOD, "GET /server_info": (200, {"vllm_config": config}), START: (200, {"message": "done"})}


def client(fake, **settings):
    return tx.make_engine("vllm", url=fake.url, timeout_s=5.0, **settings)


def update(engine, version):
    engine.connect(JOIN)
    engine.prefetch(version)
    with engine.updating(version):
        engine.load({"version": version, "path": f"/root/d/weight_v{version:06}"})
        engine.verify({"fc.weight": "00"})


def messages(fake):
    bodies = [call.body for call in fake.calls if isinstance(call.body, dict)]
    told = [body.get("init_info") or body.get("update_info") for body in bodies]
    told = [message and message.get("message", message) for message in told]  # one for each replica is in an envelope
    return [bare(message) for message in told if message and "connection" in message]


def test_every_step_names_the_draft_and_the_base_keeps_its_label():
    with running(speculating()) as fake:
        engine = client(fake)
        draft = engine.draft()
        update(draft, 3)
        told = messages(fake)
        assert [one["kind"] for one in told if one["kind"] != "poll"] == (
            ["join", "prefetch", "state", "load", "verify", "seal", *["finish"] * 4, "state"]
        )
        assert {(one["target"], one["connection"]) for one in told} == {("draft", "d")}
        routes = [call.route for call in fake.calls]
        assert routes.count(START) == 1 and "POST /start_weight_update" not in routes
        (finish,) = (call for call in fake.calls if call.route == "POST /finish_weight_update")
        assert not finish.body, "a label would be the base's"
        (row,) = draft.rows()
        assert (row.engine, row.state, row.version) == (fake.url, "serving", 3)
        assert draft.info().weight_version == "3" and engine.info().weight_version == "7"
        assert draft.draft().url == fake.url and draft.paused_by is engine
        with pytest.raises(ConfigError, match="a draft model"):
            draft.logprobs([[1, 2]])


def test_updates_of_the_base_name_no_target_and_warn_once_of_a_draft_that_is_left_behind(caplog):
    with running(speculating()) as fake, caplog.at_level(logging.WARNING):
        engine = client(fake)
        update(engine, 1), update(engine, 2)
        assert not any("target" in one for one in messages(fake))
        assert START not in fake.counts and fake.counts["POST /start_weight_update"] == 2
        (said,) = (one.getMessage() for one in caplog.records if "draft" in one.getMessage())
        assert said.startswith(f"{fake.url} keeps the weights of its draft model (eagle)") and "client.draft()" in said


@pytest.mark.parametrize("method", ["ngram", "suffix", None])
def test_nothing_is_said_where_no_model_drafts(method, caplog):
    with running(speculating(method)) as fake, caplog.at_level(logging.WARNING):
        update(client(fake), 1)
        assert "draft" not in caplog.text


def test_nothing_is_said_where_the_draft_has_a_client_of_its_own(caplog):
    with running(speculating()) as fake, caplog.at_level(logging.WARNING):
        fleet = Pool([client(fake)])
        assert isinstance(fleet.draft(), Pool) and fleet.draft().members() == (fake.url,)
        update(fleet, 1)
        assert "draft" not in caplog.text


def test_the_reason_of_an_engine_without_a_draft_model_arrives_and_it_is_not_paused():
    words = "ConfigError: this worker has no draft model. Expected: --speculative-config"
    with running(speculating("ngram"), post_init_weight_transfer_engine=failed(words)) as fake:
        with pytest.raises(EngineRefusedError, match="this worker has no draft model"):
            update(client(fake).draft(), 1)
        assert "POST /pause" not in fake.counts


@pytest.mark.parametrize("make", ["sglang", "stock-sglang", "embedded"])
def test_engines_whose_draft_model_no_update_reaches_say_so_before_anything_is_sent(make):
    with FakeEngine(make, {"weight": torch.zeros(1)}) as fake:
        with pytest.raises(ConfigError, match="no update reaches the draft model") as caught:
            tx.make_engine(make.removeprefix("stock-"), url=fake.url).draft()
        assert "keeps the weights that the engine was started with" in str(caught.value)
        assert ("sgl_kernel" in str(caught.value)) == ("sglang" in make) and not fake.calls


def test_a_vllm_without_our_backend_refuses_when_a_sender_joins_and_an_object_at_once(tmp_path):
    with FakeEngine("stock-vllm", {"weight": torch.zeros(1)}) as fake:
        draft = client(fake).draft()
        with pytest.raises(ConfigError, match="draft model of vLLM without our backend"):
            draft.connect(JOIN)
        assert fake.serving
    with pytest.raises(ConfigError, match="no update reaches the draft model of inprocess engines"):
        tx.make_engine("inprocess", engine=torch.nn.Linear(2, 2)).draft()
    ranks = tx.WeightSender(tx.DiskTransport(tmp_path), None).engine
    assert ranks.draft() is ranks, "trainer ranks that drive no engine"


def test_senders_of_base_and_draft_take_turns_in_a_process():
    with running(speculating()) as fake:
        engine = client(fake)
        first, second = (Connection(one, None, transport="disk") for one in (Pool([engine]), engine.draft()))
        refused = pytest.raises(ConcurrentUpdateError, match="another sender of this process")
        with first.turn(), refused, second.turn():
            pass
        with second.turn():
            pass
