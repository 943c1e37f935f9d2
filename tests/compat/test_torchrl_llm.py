"""TorchRL's own names for LLM weight sync over our engines: the code of today after one changed import."""

from __future__ import annotations

import inspect
import threading

import httpx
import pytest
import torch
import torchrl.weight_update.llm as theirs
from torch import nn

import torchrl_ext as tx
import torchrl_ext.compat.torchrl_llm.schemes as ours
from tests.collectors.collecting import followers, make_policy, same, train
from tests.embedded import EmbeddedServer
from tests.models import tiny_checkpoint, tiny_model
from torchrl_ext.errors import (
    ConfigError,
    NotConnectedError,
    UpdateError,
)
from torchrl_ext.weights.digests import tensor_digest
from torchrl_ext.weights.source import as_source

SCHEMES = ["SGLangWeightSyncScheme", "VLLMDoubleBufferSyncScheme", "VLLMWeightSyncScheme"]
ENDS = [
    "SGLangWeightSender",
    "VLLMDoubleBufferWeightReceiver",
    "VLLMDoubleBufferWeightSender",
    "VLLMWeightReceiver",
    "VLLMWeightSender",
]


class Collector:
    version = 0

    def increment_version(self):
        self.version += 1


@pytest.mark.parametrize("name", SCHEMES)
def test_constructors_take_what_torchrls_take(name):
    expected = inspect.signature(getattr(theirs, name)).parameters
    found = inspect.signature(getattr(ours, name)).parameters
    assert [(p.name, p.kind, p.default) for p in found.values()] == [
        (p.name, p.kind, p.default) for p in expected.values()
    ]


def test_every_name_of_torchrl_but_its_transports_is_here_and_what_users_import_is_at_the_top():
    transports = {"VLLMDoubleBufferTransport", "SGLangCollectiveTransport"}
    assert set(theirs.__all__) - transports <= set(ours.__all__)
    for name in (*SCHEMES, "VLLMCollectiveTransport"):
        assert getattr(tx, name) is getattr(ours, name)


@pytest.mark.parametrize("name", ENDS)
def test_senders_and_receivers_have_the_methods_of_torchrls(name):
    mine, wanted = getattr(ours, name), getattr(theirs, name)
    for method, function in inspect.getmembers(wanted, inspect.isfunction):
        if not method.startswith("_"):
            taken, expected = (list(inspect.signature(f).parameters) for f in (getattr(mine, method), function))
            assert taken[: len(expected)] == expected, method


def test_metadata_is_that_of_torchrl():
    model = make_policy()
    assert ours.get_model_metadata(model) == theirs.get_model_metadata(model)
    with pytest.raises(TypeError, match="Cannot extract state_dict"):
        ours.get_model_metadata({})


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with EmbeddedServer(tiny_checkpoint(tmp_path_factory.mktemp("model")), dtype="float32", threads=1) as running:
        yield running


def test_the_collective_scheme_drives_an_engine_by_its_address(server):
    scheme, model, collector = ours.VLLMWeightSyncScheme(), tiny_model(1), Collector()
    sender = scheme.create_sender()
    sender.register_model(model)
    sender.register_collector(collector)
    with pytest.raises(NotConnectedError, match="call init_all_workers_group first"):
        sender.update_weights()
    sender.init_all_workers_group(ours.get_model_metadata(model), vllm_engine=server.url)
    receiver = scheme.create_receiver(server.url)
    assert receiver.poll_and_apply() is False
    train(model)
    assert sender.update_weights().verified
    with pytest.raises(UpdateError):
        sender.update_weights({"x": torch.zeros(1)})
    assert collector.version == 1
    sender.shutdown()


def test_a_collective_receiver_lands_in_a_module_of_its_process():
    model, served = make_policy(), make_policy(1)
    scheme = ours.VLLMWeightSyncScheme()
    metadata = ours.get_model_metadata(model)
    sender, receiver = scheme.create_sender(), scheme.create_receiver(served)
    sender.register_model(model)
    with pytest.raises(NotConnectedError, match="call init_all_workers_group first"):
        receiver.poll_and_apply()
    joining = threading.Thread(target=receiver.init_all_workers_group, args=(metadata,))
    joining.start()
    sender.init_all_workers_group(metadata)
    joining.join(30)
    assert receiver.poll_and_apply(0.01) is False
    sending = threading.Thread(target=sender.update_weights)
    sending.start()
    assert receiver.poll_and_apply(30) is True
    sending.join(30)
    assert same(served.state_dict(), model.state_dict())
    receiver.shutdown()
    sender.shutdown()


def test_a_double_buffer_is_read_when_the_reader_likes(tmp_path):
    model, served = make_policy(), make_policy(1)
    scheme = ours.VLLMDoubleBufferSyncScheme(str(tmp_path / "weights"), num_threads=4)
    sender, receiver = scheme.create_sender(), scheme.create_receiver(served)
    with pytest.raises(NotConnectedError, match="no weights to send"):
        sender.update_weights()
    sender.register_model(dict(model.state_dict()))  # a plain dict takes no weak reference
    sender.register_model(model)
    assert receiver.poll_and_apply(timeout=0) is False
    for seed in (1, 2):
        train(model, seed)
        sender.update_weights()
        assert receiver.poll_and_apply() is True
        assert same(served.state_dict(), model.state_dict())
        assert receiver.poll_and_apply(timeout=0) is False
    sender.update_weights({"module.0.weight": torch.zeros(2, 2)})
    with pytest.raises(UpdateError, match=r"module\.0\.weight"):
        receiver.poll_and_apply()
    assert same(served.state_dict(), model.state_dict())
    other = make_policy(4)
    receiver.apply_weights(other.state_dict())
    assert same(served.state_dict(), other.state_dict())
    with pytest.raises(ValueError, match="out of place"):
        receiver.apply_weights(other.state_dict(), inplace=False)
    receiver.shutdown()
    sender.shutdown()


def test_a_double_buffer_brings_a_server_to_what_was_published(server, tmp_path):
    model = tiny_model(2)
    scheme = ours.VLLMDoubleBufferSyncScheme(str(tmp_path / "weights"))
    sender, receiver = scheme.create_sender(), scheme.create_receiver(server.url)
    sender.register_model(model)
    for seed in (1, 2):
        train(model, seed)
        sender.update_weights()
        assert receiver.poll_and_apply() is True
        assert receiver.poll_and_apply(timeout=0) is False
        served = httpx.get(f"{server.url}/weights_digest").json()["digests"]
        assert {name: served[name] for name, _ in as_source(model)} == {
            n: tensor_digest(t) for n, t in as_source(model)
        }
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]  # nothing was written a second time
    sender.update_weights({"lm_head.weight": torch.zeros(3)})
    with pytest.raises(UpdateError, match=r"lm_head\.weight.*version 3 "):
        receiver.poll_and_apply()
    sender.update_weights()
    assert receiver.poll_and_apply() is True
    receiver.shutdown()
    sender.shutdown()
    assert not list((tmp_path / "weights").glob(".probe*"))


@pytest.mark.parametrize("name", SCHEMES)
def test_the_schemes_reach_the_workers_of_a_collector_where_they_are_told_to(name, tmp_path):
    remote, local = tmp_path / "remote", tmp_path / "local"
    remote.mkdir()
    local.symlink_to(remote)
    buffered = {"remote_addr": str(remote), "local_addr": str(local)}
    server = {"server_url": "http://127.0.0.1:1"} if "SGLang" in name else {}
    policy, models = make_policy(), [make_policy(1), make_policy(2)]
    scheme = getattr(ours, name)(**(buffered if "Buffer" in name else {"master_address": "127.0.0.2", **server}))
    with followers(scheme, models, model=policy) as ends:
        for end in ends:
            joined = end.receiver_transport._receiver._end
            if "Buffer" in name:
                assert str(joined._store.root) == str(remote)  # resolved as it was admitted
            else:
                assert joined.member.address == end.host == "127.0.0.2"
        train(policy)
        scheme.send()
        assert all(same(model.state_dict(), policy.state_dict()) for model in models)


def test_an_sglang_scheme_says_what_it_cannot_do():
    with pytest.raises(ConfigError, match="requires pause_mode='abort'"):
        ours.SGLangWeightSyncScheme("http://127.0.0.1:1", flush_cache_on_update=True, pause_mode="retract")
    scheme = ours.SGLangWeightSyncScheme("http://127.0.0.1:1/", num_gpus=2)
    assert (scheme.world_size, scheme.server_url, scheme.create_receiver()) == (3, "http://127.0.0.1:1", None)
    sender, model = scheme.create_sender(), nn.Linear(1, 1)
    sender.register_model(model)
    with pytest.raises(NotConnectedError, match="call init_all_workers_group first"):
        sender.update_weights()
    assert sender.flush_cache() is False
