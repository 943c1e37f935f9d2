"""What strangers on an engine's port can have of it: nothing without the key, and never more than an update needs."""

import json
import os
import random

import pytest
import torch

import torchrl_ext as tx
from tests.engines.embedded import EmbeddedServer
from tests.hostile import worse_json
from tests.models import PROMPT, tiny_model
from tests.sync.by_hand import invitation, prepared, told
from torchrl_ext.base.errors import ConfigError, EngineRefusedError
from torchrl_ext.base.messages import Inspect, Join, Load, Prefetch, Rehearse, Start, State, Verify
from torchrl_ext.base.routes import CALL, bears_key, called
from torchrl_ext.base.types import API_KEY_VARIABLE, ParamMeta
from torchrl_ext.control.requests.client import InferenceClient
from torchrl_ext.data.stores.local import LocalStore
from torchrl_ext.data.stores.opening import ROOTS_VARIABLE, admit
from torchrl_ext.data.transports.disk import SharedRoot
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.engines.update_from_disk import _located
from torchrl_ext.sync.inspection import inspect

KEY = "sesame"


@pytest.fixture(scope="module")
def guarded(checkpoint, tmp_path_factory):
    """An engine with a key, whose trainers may use one directory."""
    allowed = tmp_path_factory.mktemp("allowed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(API_KEY_VARIABLE, KEY)
        patch.setenv(ROOTS_VARIABLE, f"{allowed}, s3://bucket/prefix")
        running = EmbeddedServer(checkpoint, dtype="float32", threads=1)
    with running:
        running.allowed = allowed
        yield running


def test_who_has_the_key_trains_from_an_allowed_root(guarded, tmp_path):
    with tx.WeightSender(tx.DiskTransport(guarded.allowed), tx.connect(guarded.url, api_key=KEY)) as sender:
        assert sender.update_weights(tiny_model(1)).verified
    (found,) = InferenceClient(guarded.url, api_key=KEY).generate([PROMPT], max_tokens=4, ignore_eos=True)
    assert len(found.token_ids) == 4
    sender = tx.WeightSender(tx.DiskTransport(tmp_path), tx.connect(guarded.url, api_key=KEY))
    with sender, pytest.raises(tx.WeightSyncError, match=f"does not open {tmp_path}(.|\n)*{ROOTS_VARIABLE}"):
        sender.update_weights(tiny_model(1))


@pytest.mark.parametrize(
    ("root", "named", "allowed"),
    [
        ("/shared/updates", None, True),
        ("file:///shared/updates", None, True),
        ("relative", None, False),
        ("s3://bucket/x", None, True),
        ("ftp://127.0.0.1/x", None, False),
        ("/shared/updates", "", False),
        ("s3://bucket/x", " , ", False),
        ("relative", "/", False),
        ("/shared/updates", "/shared", True),
        ("/shared/updates", "file:///shared", True),
        ("file:///shared/../etc", "file:///shared", False),
        ("/shared", "/shared", True),
        ("/shared2", "/shared", False),
        ("/shared/../etc", "/shared", False),
        ("s3://bucket/prefix/run", "s3://bucket/prefix", True),
        ("s3://bucket/prefix2", "s3://bucket/prefix", False),
        ("s3://bucket/prefix/../x", "s3://bucket/prefix", False),
        ("sftp://host/x", "/shared,sftp://host", True),
        (7, None, False),
        ("", None, False),
        ("/a\0b", None, False),
    ],
)
def test_roots_that_an_engine_may_open(monkeypatch, root, named, allowed):
    if named is not None:
        monkeypatch.setenv(ROOTS_VARIABLE, named)
    if allowed:
        assert admit(root) == root.removeprefix("file://")
    else:
        with pytest.raises(ConfigError):
            admit(root)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_link_is_admitted_as_what_it_leads_to(monkeypatch, tmp_path, scheme):
    (tmp_path / "allowed" / "run").mkdir(parents=True)
    (tmp_path / "private").mkdir()
    (tmp_path / "allowed" / "out").symlink_to(tmp_path / "private")
    (tmp_path / "into").symlink_to(tmp_path / "allowed" / "run")
    monkeypatch.setenv(ROOTS_VARIABLE, f"{scheme}{tmp_path / 'allowed'}")
    assert admit(f"{scheme}{tmp_path / 'into'}") == str(tmp_path / "allowed" / "run")
    for other in ("allowed/out", "allowed/../private"):
        with pytest.raises(ConfigError, match="does not open"):
            admit(f"{scheme}{tmp_path / other}")


@pytest.mark.parametrize("transport", ["delta", "disk"])
def test_a_link_that_is_moved_after_the_join_opens_nothing_else(monkeypatch, tmp_path, transport):
    for name, value in (("allowed", 1.0), ("private", 2.0)):
        with tx.make_transport(transport, root=tmp_path / name / "run") as other:
            other.send_weights({"w": torch.full((8,), value)})
    (tmp_path / "allowed" / "now").symlink_to("run")
    monkeypatch.setenv(ROOTS_VARIABLE, str(tmp_path / "allowed"))
    held = {"w": torch.zeros(8)}
    receiver = tx.WeightReceiver(held)
    with tx.make_transport(transport, root=tmp_path / "allowed" / "now") as trainer:
        receiver.handle(invitation(trainer, held))
        (tmp_path / "allowed" / "next").symlink_to(tmp_path / "private" / "run")
        os.replace(tmp_path / "allowed" / "next", tmp_path / "allowed" / "now")
        for message in (Prefetch(version=1), Start(), Load(version=1, handoff={})):
            receiver.handle(message)
    assert held["w"].tolist() == [1.0] * 8


def test_the_root_that_holds_a_named_version_has_to_be_admitted(monkeypatch, tmp_path):
    with tx.DiskTransport(tmp_path / "run") as trainer:
        trainer.send_weights({"w": torch.ones(4)})
    version = tmp_path / "run" / "weight_v000001"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "weight_v000001").symlink_to(version)
    monkeypatch.setenv(ROOTS_VARIABLE, str(tmp_path / "run"))
    chain, number = _located(str(tmp_path / "elsewhere" / "weight_v000001"))
    assert (chain.store.url, number) == (str(tmp_path / "run"), 1)
    monkeypatch.setenv(ROOTS_VARIABLE, str(version))
    with pytest.raises(ConfigError, match=f"does not open {tmp_path / 'run'}"):
        _located(str(version))


def test_a_refused_root_is_named_without_its_password():
    with pytest.raises(ConfigError) as refused:
        admit("ftp://user:secret@host/x")
    assert "ftp://host/x" in str(refused.value) and "secret" not in str(refused.value)


def test_a_stranger_learns_nothing_of_files_that_are_no_probes(http, tmp_path):
    (tmp_path / "secret").write_bytes(b"content")
    os.mkfifo(tmp_path / "pipe")
    found = []
    for root, probe, content in (
        (tmp_path, "secret", "content"),
        (tmp_path, "secret", "other"),
        (tmp_path, "missing", "content"),
        (tmp_path, "pipe", "content"),
        (tmp_path, ".probe.tmp-../../secret", "content"),
        ("/dev", "zero", "content"),
    ):
        invitation = {"root": str(root), "probe": probe, "run_id": content, "trainer": "here"}
        answer = told(http, Inspect(root=invitation))["root"]
        found.append({**answer, "why": answer["why"].replace(repr(probe), "...")})
    assert all(answer == found[0] for answer in found) and not found[0]["seen"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "secret"]


def test_inspect_of_disallowed_root_names_roots_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHRL_EXT_ROOTS", str(tmp_path / "allowed"))
    answer = inspect(Inspect(root=SharedRoot(LocalStore(tmp_path), "run").invite()))["root"]
    assert not answer["seen"] and "TORCHRL_EXT_ROOTS" in answer["remedy"]


@pytest.mark.parametrize("route", ["/resume", "/wake_up", "/sleep?level=1"])
def test_a_version_ends_when_somebody_resumes_the_engine(server, http, tmp_path, route):
    """Nothing of a version that was started is loaded into an engine that went on, or sleeps."""
    model = tiny_model(1)
    assert http.post("/pause?mode=keep").status_code == 200
    with tx.DiskTransport(tmp_path) as transport:
        assert "error" not in told(http, invitation(transport, model))
        load = prepared(transport, model, 1)
        assert told(http, Start()) == {}
        assert http.post(route).status_code == 200
        assert "error" in told(http, load) and http.post("/pause?mode=keep").status_code == 200
        assert http.post("/wake_up").status_code == 200 and http.post("/pause?mode=keep").status_code == 200
        assert told(http, load)["error"]["kind"] == "NotConnectedError"
        assert told(http, State())["whole"]
    with tx.WeightSender(tx.make_transport("collective"), tx.connect(server.url)) as sender:
        assert sender.update_weights(model).verified
    assert not http.get("/is_paused").json()["is_paused"]


def test_nothing_resumes_an_engine_with_a_part_of_a_version(server, http, tmp_path):
    """An engine whose load broke stays paused, whoever resumes it, until the next update."""
    model = tiny_model(1)
    assert http.post("/pause?mode=keep").status_code == 200
    with tx.DiskTransport(tmp_path) as transport:
        told(http, invitation(transport, model))
        load = prepared(transport, model, 1)
        told(http, Start())
        (folder,) = tmp_path.glob("weight_v*")
        for file in folder.glob("*.safetensors"):
            file.write_bytes(file.read_bytes()[:-8])
        assert "error" in told(http, load)
        for route in ("/resume", "/wake_up", "/wake_up?tags=kv_cache"):
            answer = http.post(route)
            assert answer.status_code == 409 and "a part of an update" in answer.json()["error"]["message"]
            assert http.get("/is_paused").json()["is_paused"]
    with pytest.raises(EngineRefusedError):
        tx.make_engine("embedded", url=server.url).resume()
    with tx.WeightSender(tx.make_transport("collective"), tx.connect(server.url)) as sender:
        assert sender.update_weights(model).verified
    assert not http.get("/is_paused").json()["is_paused"]


def test_a_thousand_damaged_requests_end_in_words_of_ours(http, tmp_path):
    params = [ParamMeta.of(name, tensor).to_json() for name, tensor in as_source(tiny_model(1))]
    shared = {"root": str(tmp_path), "run_id": "a" * 32, "probe": ".probe.tmp-" + "0" * 32, "host": "here"}
    (tmp_path / shared["probe"]).write_text(shared["run_id"])
    group = {"master_address": "127.0.0.1", "master_port": 9, "world_size": 2, "backend": "gloo", "room": "r"}
    offers = [
        ("disk", shared),
        ("delta", {**shared, "base": str(tmp_path), "needs_base": True}),
        ("ipc", {**group, "timeout_s": 0.05}),
        ("collective", {**group, "bucket_bytes": 1000, "timeout_s": 0.05}),
    ]
    joining = [
        Join.from_json({"transport": name, "params": params, "timeout_s": 0.05, "offer": offer}).to_json()
        for name, offer in offers
    ]
    joining += [Inspect(root=shared).to_json(), Rehearse(how="once", ask=True).to_json()]
    joining += [{**Load(version=1, handoff={}).to_json(), "params": params}]
    sampling = {"max_tokens": 1, "temperature": 1.0, "top_k": 2, "stop_token_ids": [1], "logprobs": 1, "n": 1}
    asks = [
        ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": sampling, "request_id": "x"}),
        ("/prompt_logprobs", {"prompts": [[1, 2], [3, 4]]}),
        ("/collective_rpc", called(Verify(digests={"a": "b"}))),
        ("/update_weight_version", {"new_version": "1"}),
    ]
    chance = random.Random(0)
    for _ in range(1000):
        route, body = chance.choice(asks)
        body = worse_json(body, chance)
        if chance.random() < 0.6:
            route, message = "/collective_rpc", chance.choice(joining)
            info = worse_json(message, chance)
            whole = isinstance(info, dict) and "params" in message and chance.random() < 0.9
            body = {"method": CALL, "args": [json.dumps({**info, "params": params} if whole else info)]}
        answer = http.post(route, content=json.dumps(body), headers={"content-type": "application/json"})
        error = answer.json().get("error", {}) if answer.status_code != 200 else {}
        assert "its log has the reason" not in error.get("message", ""), (route, str(body)[:1000], error)
    assert http.get("/health").status_code == 200


def test_keys_are_compared_as_a_whole():
    assert bears_key(None, []) and bears_key("Bearer a", ["b", "a"]) and bears_key("bearer a", ["a"])
    assert not any(bears_key(told, ["abc"]) for told in (None, "", "Bearer", "Bearer ab", "Bearer abcd", "abc"))
