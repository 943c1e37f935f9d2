"""Backend ``torchrl_ext`` below vLLM's trainer API: over clients and sources of others, in one process and on ranks."""

from __future__ import annotations

import httpx
import pytest
import torch
from torch import nn

from tests.compat.vllm_api import Client, Declared, FanOut, TRLs
from tests.fakes import FakeEngine
from torchrl_ext.base.errors import ConfigError, EngineRefusedError, EngineUnreachableError, ManifestError
from torchrl_ext.compat.vllm_api import (
    TorchRLExtTrainerEngine,
    TorchRLExtTrainerInitInfo,
    VLLMSource,
)
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


def test_a_client_of_several_engines_is_refused(tmp_path):
    """It hands on one engine's answer, and that of another one might be an error."""
    with FakeEngine("vllm") as one, FakeEngine("vllm") as other:
        with pytest.raises(ConfigError, match="several engines"):
            trainer(FanOut(one.url, other.url), Declared(weights(1)), tmp_path)
        assert not one.wrongs and not other.wrongs


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
