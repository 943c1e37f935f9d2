"""Backend ``torchrl_ext`` below vLLM's trainer API: over clients and sources of others, in one process and on ranks."""

from __future__ import annotations

import httpx
import pytest
import torch
from torch import nn

from tests.compat.vllm_api import Client, Declared, FanOut, TRLs
from tests.fakes import FakeEngine
from torchrl_ext.base.errors import ConfigError, EngineRefusedError, EngineUnreachableError, ManifestError, UpdateError
from torchrl_ext.compat.vllm_api import (
    ClientPort,
    TorchRLExtTrainerEngine,
    TorchRLExtTrainerInitInfo,
    VLLMSource,
)
from torchrl_ext.control.engine import Engine
from torchrl_ext.data.weights.source import checked


def weights(step):
    return {"a": torch.arange(4.0) + step, "b": torch.full((4,), 0.5 + step)}


def paused(*fakes):
    """The framework's part before an update."""
    for fake in fakes:
        httpx.post(f"{fake.url}/pause?mode=keep").raise_for_status()


def trainer(client, source, root=None, rank=0, **info):
    settings = {} if root is None else {"root": str(root)}
    told = TorchRLExtTrainerInitInfo(**{"settings": settings, "rank": rank, **info})
    return TorchRLExtTrainerEngine.trainer_init(told, client=client, source=source)


def served(fake, step):
    return all(torch.equal(fake.tensors[name], tensor) for name, tensor in weights(step).items())


@pytest.mark.parametrize("client", [Client, TRLs, FanOut])
def test_server_follows_through_foreign_client_and_owner_pauses(client, tmp_path):
    tensors = weights(1)
    with FakeEngine("vllm") as fake:
        fake.unrehearsed = True
        engine = trainer(client(fake.url), Declared(tensors), tmp_path)
        assert engine.is_sender and fake.serving and fake.counts["POST /start_weight_update"] == 0
        for step in (1, 2):
            tensors |= weights(step)
            paused(fake)
            report = engine.send_weights()
            assert report is engine.last_report and report.version == step
            assert report.verified and report.proof == "rehearsed" and served(fake, step)
            assert fake.label == (str(step) if client is not TRLs else "default") and fake.paused
            httpx.post(f"{fake.url}/resume").raise_for_status()
        assert not fake.wrongs and fake.counts["POST /pause"] == fake.counts["POST /resume"] == 2
        assert not {"POST /reset_prefix_cache", "GET /is_sleeping", "GET /server_info"} & {*fake.counts}
        engine.shutdown()
        engine.shutdown()


def test_a_source_yields_what_it_declares_and_its_rank_holds():
    tensors = {name: nn.Parameter(tensor) for name, tensor in weights(1).items()}
    source = VLLMSource(Declared(tensors))
    found = {meta.name: tensor for meta, tensor in checked(source)}
    assert found.keys() == tensors.keys() and not any(tensor.requires_grad for tensor in found.values())
    part = VLLMSource(Declared(tensors, held={"b"}))
    assert [name for name, _ in part] == [shard.meta.name for shard in part.shards()] == ["b"]
    with pytest.raises(ManifestError, match="Expected: a"):
        list(checked(part))


class TestSeveral:
    def test_each_server_behind_one_client_proves_its_update(self, tmp_path):
        tensors = weights(1)
        with FakeEngine("vllm") as one, FakeEngine("vllm") as other:
            client = FanOut(one.url, other.url)
            assert Engine.of(ClientPort(client)).info().world_size == 2
            engine = trainer(client, Declared(tensors), tmp_path)
            other.unrehearsed = True  # the first has nothing to rehearse
            paused(one, other)
            assert engine.send_weights().proof == "rehearsed" and not other.unrehearsed
            assert served(one, 1) and served(other, 1)
            other.inject("fail", "POST /update_weights")
            tensors |= weights(2)
            with pytest.raises(UpdateError, match=rf"(?s){other.url} failed \[500\].*fails here.*part of an update"):
                engine.send_weights()
            assert engine.last_report.version == 1
            other.heal()
            assert engine.send_weights().verified and served(one, 2) and served(other, 2)
            assert not one.wrongs and not other.wrongs

    def test_failure_of_second_server_is_not_hidden_by_first(self, tmp_path):
        refused = pytest.raises(EngineRefusedError, match=r"Invalid init_info.*--weight-transfer-config")
        with FakeEngine("vllm") as one, FakeEngine("stock-vllm") as other, refused:
            trainer(FanOut(one.url, other.url), Declared(weights(1)), tmp_path)
        with FakeEngine("vllm") as one, FakeEngine("vllm") as other:
            engine = trainer(FanOut(one.url, other.url), Declared(weights(1)), tmp_path)
            paused(one)  # the other one serves, so that it refuses to rehearse
            one.unrehearsed = other.unrehearsed = True
            with pytest.raises(UpdateError, match="weights cannot change while the engine generates"):
                engine.send_weights()

    def test_transports_with_ranks_need_offsets(self):
        tensors = weights(1)
        with FakeEngine("vllm") as one, FakeEngine("vllm") as other:
            engine = trainer(FanOut(one.url, other.url), Declared(tensors), transport="collective")
            paused(one, other)
            with pytest.raises(UpdateError, match=r"several deployments.*rank_offset"):
                engine.send_weights()
            engine.shutdown()
            client = FanOut(one.url, other.url, offsets=(1, 2))
            engine = trainer(client, Declared(tensors), transport="collective", world_size=3)
            assert engine.send_weights().verified and served(one, 1) and served(other, 1)
            engine.shutdown()


class TestFailures:
    def test_servers_that_are_none_say_so_in_their_own_words(self, tmp_path):
        with FakeEngine("stock-vllm") as stock:
            for client in (Client, TRLs):
                with pytest.raises(EngineRefusedError, match=r"Invalid init_info.*--weight-transfer-config"):
                    trainer(client(stock.url), Declared(weights(1)), tmp_path)
            stock.answers["POST /init_weight_transfer_engine"] = (404, {"detail": "Not Found"})
            with pytest.raises(EngineRefusedError, match="VLLM_SERVER_DEV_MODE=1"):
                trainer(Client(stock.url), Declared(weights(1)), tmp_path)
        with pytest.raises(EngineUnreachableError, match="refused"):
            trainer(Client(stock.url), Declared(weights(1)), tmp_path)

        class Mute(Client):
            def call(self, route, body=None):
                """Raise nothing, whatever the server says."""

        with pytest.raises(EngineRefusedError, match=r"no worker behind .* answered"):
            trainer(Mute("http://engine"), Declared(weights(1)), tmp_path)
        with pytest.raises(ConfigError, match="declares no weights"):
            trainer(Mute("http://engine"), None, tmp_path)

    def test_another_trainer_replaces_this_one_until_it_joins_again(self, tmp_path):
        with FakeEngine("vllm") as fake:
            first = trainer(Client(fake.url), Declared(weights(1)), tmp_path / "1")
            second = trainer(Client(fake.url), Declared(weights(2)), tmp_path / "2")
            paused(fake)
            first.send_weights()
            second.send_weights()
            assert served(fake, 2)
            report = first.send_weights()
            assert report.verified and served(fake, 1) and report.version == 3  # what the workers say is not used again
