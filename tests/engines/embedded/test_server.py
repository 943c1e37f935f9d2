"""The embedded engine behind its routes: who may call them, and what an update does to requests that run."""

import threading

import httpx
import pytest

import torchrl_ext as tx
from tests.engines.embedded import served_here
from tests.models import PROMPT, tiny_checkpoint, tiny_model
from tests.sync.by_hand import told
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.messages import Finish, Join, Load, State
from torchrl_ext.data.landing.loader import as_loader
from torchrl_ext.data.transports.native import NativeTransport
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.engines.embedded.engine import EmbeddedEngine

CONTEXT = 4096
LONG = 1500


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), seed=0, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def server(checkpoint):
    with served_here(EmbeddedEngine(str(checkpoint), dtype="float32")) as running:
        yield running


def test_a_response_has_vllms_shape(http):
    body = {"token_ids": PROMPT, "request_id": 7, "sampling_params": {"max_tokens": 1, "temperature": 0, "logprobs": 3}}
    answer = http.post("/inference/v1/generate", json=body).json()
    (choice,) = answer["choices"]
    (entry,) = choice["logprobs"]["content"]
    assert entry["token_id"] == choice["token_ids"][0] == entry["top_logprobs"][0]["token_id"]
    assert [candidate["rank"] for candidate in entry["top_logprobs"]] == [1, 2, 3]
    assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9}
    assert (answer["request_id"], answer["output_mode"]) == ("7", "tokens")


@pytest.mark.parametrize(
    ("how", "status", "words"),
    [
        ({"content": b'{"prompts": [[1]]}'}, 415, "send content-type: application/json"),
        ({"content": b'{"prompts": [[1]]}', "headers": {"content-type": "text/plain"}}, 415, "'text/plain'"),
        ({"json": {"prompts": [[1]]}, "headers": {"origin": "https://page.example"}}, 403, "web pages"),
        ({"headers": {"origin": "null"}}, 403, "web pages"),
        ({"content": b"{", "headers": {"content-type": "application/json; charset=utf-8"}}, 400, "not JSON"),
        ({"json": {"prompts": [["1"]]}}, 400, "prompts is malformed"),
        ({}, 400, "prompts is malformed"),
        ({"json": {"prompts": [[]]}}, 400, "a prompt has 0 tokens"),
        ({"json": {"prompts": [[1], [1, 2]]}}, 200, "logprobs"),
    ],
)
def test_a_body_is_json_that_says_so_and_no_web_page_sends_it(http, how, status, words):
    """A page of any site can have a browser post text to loopback; for JSON the browser asks the server first."""
    answer = http.post("/prompt_logprobs", **how)
    assert (answer.status_code, words in answer.text) == (status, True), answer.text


def test_broadcasts_of_stock_engines_are_refused_before_a_group_is_opened(server, monkeypatch):
    monkeypatch.setattr(NativeTransport, "_open", None)
    assert "native" not in tx.discover(server.url)[0].transports
    sender, refusal = tx.WeightSender(tx.make_transport("native"), server.url), "cannot follow by transport 'native'"
    with sender, pytest.raises(tx.WeightSyncError, match=refusal) as refused:
        sender.update_weights(tiny_model(1))
    assert "collective" in refused.value.expected and "make_transport" in refused.value.hint


def test_a_step_out_of_turn_is_refused(http):
    http.post("/pause?mode=keep")
    for message in (Load(version=77, handoff={}), Finish(version=77)):
        assert told(http, message)["error"]["kind"] in ("NotConnectedError", "EngineRefusedError")
    assert told(http, State())["whole"] and http.post("/resume").status_code == 200


def test_what_fails_by_a_fault_of_ours_is_in_the_log_alone(http, server, monkeypatch, caplog):
    monkeypatch.setattr(server.engine, "logprobs", lambda prompts: {}["secret"])
    answer = http.post("/prompt_logprobs", json={"prompts": [[1]]})
    assert answer.status_code == 500 and "its log has the reason" in answer.text and "secret" not in answer.text
    assert "secret" in caplog.text


def test_a_reader_that_leaves_ends_its_request(http):
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": LONG, "ignore_eos": True}}
    with pytest.raises(httpx.ReadTimeout):
        http.post("/inference/v1/generate", json=body, timeout=0.2)
    Deadline(60).poll(lambda: http.get("/load").json()["server_load"] == 0, "it runs on")


def test_digests_of_the_weights_in_service_have_their_version(server, http, tmp_path):
    own = tiny_model(1)
    with tx.WeightSender(tx.DiskTransport(tmp_path), tx.connect(server.url)) as sender:
        version = str(sender.update_weights(own).version)
    assert http.get("/weights_digest").json() == {"digests": as_loader(own).digests(), "weight_version": version}


def test_unreachable_transport_is_refused_with_usable_ones(http):
    for name in ("memory", "pigeon"):
        expected = told(http, Join(transport=name, params=(), offer={}))["error"]["expected"]
        assert "collective" in expected and "disk" in expected and "memory" not in expected


def test_health_answers_during_a_join_and_another_trainer_joins(server, http):
    absent, params, answers = tx.make_transport("collective", timeout_s=120), as_source(tiny_model(0)).params(), []
    offer = absent.open(1, params, Deadline(60)).info

    def join():
        message = Join(transport=absent.name, params=params, world_size=2, offer=offer)
        with httpx.Client(base_url=server.url, timeout=120) as waiting:
            answers.append(told(waiting, message))

    thread = threading.Thread(target=join)
    thread.start()
    thread.join(timeout=0.5)
    assert thread.is_alive() and http.get("/health").status_code == 200
    with tx.WeightSender(tx.make_transport("collective"), tx.connect(server.url)) as sender:
        assert sender.update_weights(tiny_model(1)).verified
    thread.join(timeout=60)
    assert "error" in answers[0]
    absent.shutdown()
