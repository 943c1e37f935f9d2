"""An engine of this process takes other weights between requests, or keeps those it has."""

from __future__ import annotations

import asyncio
import functools
import threading

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import torchrl_ext as tx
from tests.sync.ends import same
from tests.sync.vllm_objects import AsyncLLM, net
from torchrl_ext.base.errors import (
    EngineRefusedError,
    EngineUnreachableError,
    ManifestError,
    UpdateError,
    WeightSyncError,
)
from torchrl_ext.data.landing.loader import TensorsLoader


@pytest.fixture
def failures(monkeypatch):
    """Errors that loads raise in the middle, one each, as long as there are any."""
    load, left = TensorsLoader.load, []

    def failing(loader, pairs):
        if left:
            load(loader, [next(iter(pairs))])
            raise left.pop()
        load(loader, pairs)

    monkeypatch.setattr(TensorsLoader, "load", failing)
    return left


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def on_a_loop(test):
    """Run a coroutine function, as a test."""
    return functools.wraps(test)(lambda *given, **more: run(test(*given, **more)))


def states(module):
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


class TestModule:
    @pytest.fixture
    def served(self):
        return nn.Linear(3, 2)

    @pytest.fixture
    def engine(self, served):
        return tx.make_engine("inprocess", engine=served)

    def test_state_dict_is_copied_in_place_and_may_be_partial(self, engine, served):
        other, before = nn.Linear(3, 2), [parameter.data_ptr() for parameter in served.parameters()]
        report = run(engine.update_model_weights_from_state_dict(other.state_dict()))
        assert same(served, other) and report.engines[0].state == "serving"
        report = run(engine.update_model_weights_from_state_dict({"bias": torch.zeros(2)}))
        assert report.part and report.bytes == 8
        given = {"decoder.linear_fc1.weight": torch.ones(2, 3)}
        mapped = engine.update_model_weights_from_state_dict(given, mapper=lambda name: name.rpartition(".")[2])
        run(mapped)
        assert same(served, {"weight": torch.ones(2, 3), "bias": torch.zeros(2)})
        assert [parameter.data_ptr() for parameter in served.parameters()] == before

    @pytest.mark.parametrize(
        ("tensors", "named"),
        [
            ({"nobody": torch.ones(2)}, "'nobody'"),
            ({"bias": torch.ones(3)}, r"'bias'.*\[3\]"),
            ({"bias": torch.zeros(2, device="meta")}, "meta device.*bias"),
        ],
    )
    def test_a_strange_tensor_is_refused_and_nothing_changes(self, engine, served, tensors, named):
        before = states(served)
        with pytest.raises(ManifestError, match=named):
            run(engine.update_model_weights_from_state_dict({"weight": torch.ones(2, 3), **tensors}))
        assert same(served, before) and engine.serving.is_set()

    def test_a_checkpoint_that_was_saved_into_is_not_put_back(self, engine, served, failures, tmp_path):
        weights = [states(nn.Linear(3, 2)) for _ in range(3)]
        save_file(weights[0], tmp_path / "model.safetensors")
        run(engine.update_model_weights(tmp_path))
        failures.append(RuntimeError("out of memory"))
        with pytest.raises(UpdateError, match=r"out of memory(.|\n)*were restored"):
            run(engine.update_model_weights_from_state_dict(weights[2]))
        assert same(served, weights[0]) and engine.serving.is_set()
        save_file(weights[1], tmp_path / "model.safetensors")  # the trainer's next one, for which nobody asked
        failures.append(RuntimeError("out of memory"))
        with pytest.raises(UpdateError, match=r"out of memory(.|\n)*not be restored either: .*model\.safetensors"):
            run(engine.update_model_weights_from_state_dict(weights[2]))
        assert not engine.serving.is_set() and not torch.equal(served.bias, weights[1]["bias"])
        run(engine.update_model_weights(tmp_path))
        assert engine.serving.is_set() and same(served, weights[1])

    def test_two_clients_of_one_module_share_pauses_and_updates(self, engine, served):
        other = tx.make_engine("inprocess", engine=served)
        assert engine.pause() and not other.pause() and not other.serving.is_set()
        other.resume()
        assert engine.serving.is_set()
        run(engine.update_model_weights_from_state_dict(nn.Linear(3, 2).state_dict()))
        run(other.update_model_weights_from_state_dict({"bias": torch.ones(2)}))
        report = run(engine.update_model_weights_from_state_dict({"weight": torch.ones(2, 3)}))
        assert not report.part and same(served, {"weight": torch.ones(2, 3), "bias": torch.ones(2)})

    @on_a_loop
    async def test_updates_at_the_same_time_queue_and_none_is_torn(self):
        served, others = nn.Linear(64, 64), [nn.Linear(64, 64).state_dict() for _ in range(6)]
        engine = tx.make_engine("inprocess", engine=served)
        updates = (engine.update_model_weights_from_state_dict(other) for other in others)
        versions = [report.version for report in await asyncio.gather(*updates)]
        assert sorted(versions) == [1, 2, 3, 4, 5, 6] and same(served, others[versions.index(6)])


class TestVLLM:
    """A stand-in for vLLM's `AsyncLLM`, in sleep mode."""

    @pytest.fixture
    def served(self, tmp_path):
        """Makes one, and its engine, on the loop of a test."""
        for seed in (0, 1):
            (tmp_path / str(seed)).mkdir()
            save_file(states(net(seed)), tmp_path / str(seed) / "model.safetensors")

        def serve():
            llm = AsyncLLM(net(0))
            llm.vllm_config.model_config.model = str(tmp_path / "0")
            return llm, tx.make_engine("inprocess", engine=llm)

        return serve

    @on_a_loop
    async def test_a_start_directory_that_was_saved_into_is_not_put_back(self, served, tmp_path):
        llm, engine = served()
        save_file(states(net(5)), tmp_path / "0" / "model.safetensors")
        llm.fake.inject("fail", "load")
        with pytest.raises(UpdateError, match=r"it fails here(.|\n)*could not be restored either: .*0/model\.safe"):
            await engine.update_model_weights(tmp_path / "1")
        assert not llm.fake.serving and not same(llm.model, net(5))

    @on_a_loop
    async def test_other_senders_weights_need_whole_checkpoint_to_switch(self, served, tmp_path):
        llm, engine = served()
        trainer = tx.WeightSender(tx.DiskTransport(tmp_path / "root"), tx.make_engine("inprocess", engine=llm))
        await asyncio.to_thread(trainer.update_weights, net(5))
        with pytest.raises(UpdateError, match=r"another sender's weights.*whole checkpoint"):
            await engine.update_model_weights_from_state_dict({"1.bias": torch.zeros(16)})
        assert same(llm.model, net(5))
        llm.fake.inject("fail", "load")
        with pytest.raises(WeightSyncError, match="came from another sender and cannot be restored"):
            await engine.update_model_weights(tmp_path / "1")
        assert not llm.fake.serving
        await engine.update_model_weights(tmp_path / "1")
        assert llm.fake.serving and same(llm.model, net(1))
        await asyncio.to_thread(trainer.shutdown)

    @on_a_loop
    async def test_drop_cached_retries_refused_resets_until_deadline(self, served):
        (llm, engine), asked = served(), []

        async def reset_prefix_cache(reset_running_requests, reset_connector):
            asked.append((reset_running_requests, reset_connector))
            return len(asked) == 3

        async def reset_encoder_cache():
            asked.append("encoder")

        llm.reset_prefix_cache, llm.reset_encoder_cache = reset_prefix_cache, reset_encoder_cache
        llm.vllm_config.model_config.multimodal_config = {}
        await asyncio.to_thread(engine.port.drop_cached)
        assert asked == [(True, True)] * 3 + ["encoder"]
        engine.port.timeout_s = 0.1
        with pytest.raises(EngineRefusedError, match="could not drop cached keys"):
            await asyncio.to_thread(engine.port.drop_cached)

    @on_a_loop
    async def test_close_removes_workers_unless_called_on_engine_loop(self, served):
        """close() makes workers leave, except on the engine's own event loop, where it would block."""
        llm, engine = served()
        for seed, elsewhere in ((1, False), (0, True)):
            sender = tx.WeightSender(tx.make_transport("ipc"), engine)
            await asyncio.to_thread(sender.update_weights, net(seed))
            before = len(llm.fake.calls)
            if elsewhere:
                await asyncio.to_thread(engine.close)
            else:
                engine.close()
            kinds = [call.kind for call in llm.fake.calls[before:]]
            assert kinds == (["leave"] if elsewhere else [])
            assert same(llm.model, net(seed)) and llm.fake.serving
            await asyncio.to_thread(sender.shutdown)

    @on_a_loop
    async def test_an_engine_without_a_request_yet_runs_on_the_callers_loop(self, served, tmp_path):
        llm, engine = served()
        llm.output_handler = None  # which vLLM makes with the first request
        await engine.update_model_weights(tmp_path / "1")
        assert llm.fake.serving and same(llm.model, net(1))

    def test_calls_fail_at_once_after_engine_event_loop_ended(self, served):
        async def main():
            return served()

        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        llm, engine = asyncio.run_coroutine_threadsafe(main(), loop).result(60)
        assert not asyncio.run_coroutine_threadsafe(llm.is_sleeping(), loop).result(60)

        async def ending(**_):
            loop.stop()
            await asyncio.sleep(600)

        llm.pause_generation = ending
        for _ in range(2):
            with pytest.raises(EngineUnreachableError, match=r"^the event loop of this AsyncLLM has ended"):
                engine.pause()
        with pytest.raises(EngineUnreachableError):
            engine.info()  # so that a fleet goes on without it
        thread.join(60)
        loop.close()
