"""An engine of this process takes other weights between requests, or keeps those it has."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import torchrl_ext as tx
from tests.models import PROMPT, greedy, greedy_over_kept_keys, tiny_checkpoint, tiny_model
from tests.sync.vllm_objects import AsyncLLM, net
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import (
    EngineError,
    EngineRefusedError,
    EngineUnreachableError,
    ManifestError,
    TransportError,
    UpdateError,
    WeightSyncError,
)
from torchrl_ext.data.landing.loader import TensorsLoader
from torchrl_ext.engines.embedded.engine import EmbeddedEngine
from torchrl_ext.engines.embedded.protocol import GenerateRequest


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        tiny_checkpoint(folder / f"seed{seed}", seed)
    tiny_checkpoint(folder / "wide", 2, hidden_size=64)
    return folder


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def states(module):
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def same(module, tensors):
    return all(torch.equal(tensor, tensors[name]) for name, tensor in module.state_dict().items())


def submitted(engine, count):
    body = {"token_ids": PROMPT, "sampling_params": {"temperature": 0, "max_tokens": count, "ignore_eos": True}}
    return engine.scheduler.submit(GenerateRequest.from_json(body, "request")).future


def pausing_in_the_fifth_pass(engine):
    """An event that is set in that pass, which then waits for a pause."""
    begun, frozen = [], threading.Event()

    def note(*_):
        begun.append(None)
        if len(begun) == 5:
            frozen.set()
            Deadline(60).poll(lambda: engine.scheduler.paused, "nobody paused")

    engine._model.register_forward_pre_hook(note)
    return frozen


class TestModule:
    def test_state_dict_is_copied_in_place_and_may_be_partial(self):
        """A state dict is copied into the module's memory; parameters absent from it keep their values."""
        served, other = nn.Linear(3, 2), nn.Linear(3, 2)
        before = [parameter.data_ptr() for parameter in served.parameters()]
        engine = tx.make_engine("inprocess", engine=served)
        report = run(engine.update_model_weights_from_state_dict(other.state_dict()))
        assert same(served, other.state_dict()) and report.engines[0].state == "serving"
        run(engine.update_model_weights_from_state_dict({"bias": torch.zeros(2)}))
        given = {"decoder.linear_fc1.weight": torch.ones(2, 3)}
        run(engine.update_model_weights_from_state_dict(given, mapper={r"decoder\.linear_fc1\.(.*)": r"\1"}))
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
    def test_a_strange_tensor_is_refused_and_nothing_changes(self, tensors, named):
        served = nn.Linear(3, 2)
        before = states(served)
        engine = tx.make_engine("inprocess", engine=served)
        with pytest.raises(ManifestError, match=named):
            run(engine.update_model_weights_from_state_dict({"weight": torch.ones(2, 3), **tensors}))
        assert same(served, before) and engine.serving.is_set()

    def test_an_update_that_fails_half_way_puts_the_old_weights_back(self, monkeypatch):
        load, failures = TensorsLoader.load, []

        def failing(loader, pairs):
            if failures:
                load(loader, [next(iter(pairs))])
                raise failures.pop()
            load(loader, pairs)

        monkeypatch.setattr(TensorsLoader, "load", failing)
        served = nn.Linear(3, 2)
        engine = tx.make_engine("inprocess", engine=served)
        good = nn.Linear(3, 2)
        run(engine.update_model_weights_from_state_dict(good.state_dict()))
        failures.append(RuntimeError("out of memory"))
        with pytest.raises(UpdateError, match=r"out of memory(.|\n)*were restored"):
            run(engine.update_model_weights_from_state_dict(nn.Linear(3, 2).state_dict()))
        assert same(served, good.state_dict()) and engine.serving.is_set()

    def test_a_checkpoint_that_was_saved_into_is_not_put_back(self, monkeypatch, tmp_path):
        weights, load, failures = [states(nn.Linear(3, 2)) for _ in range(3)], TensorsLoader.load, []

        def failing(loader, pairs):
            load(loader, [next(iter(pairs))] if failures else pairs)
            if failures:
                raise failures.pop()

        monkeypatch.setattr(TensorsLoader, "load", failing)
        served = nn.Linear(3, 2)
        engine = tx.make_engine("inprocess", engine=served)
        save_file(weights[0], tmp_path / "model.safetensors")
        run(engine.update_model_weights(tmp_path))
        save_file(weights[1], tmp_path / "model.safetensors")  # the trainer's next one, for which nobody asked
        failures.append(RuntimeError("out of memory"))
        with pytest.raises(UpdateError, match=r"out of memory(.|\n)*not be restored either: .*model\.safetensors"):
            run(engine.update_model_weights_from_state_dict(weights[2]))
        assert not engine.serving.is_set() and not torch.equal(served.bias, weights[1]["bias"])
        run(engine.update_model_weights(tmp_path))
        assert engine.serving.is_set() and same(served, weights[1])

    def test_two_clients_of_one_module_share_pauses_and_updates(self):
        """Two clients of one module see each other's pauses and build on each other's updates."""
        served, policy = nn.Linear(3, 2), nn.Linear(3, 2)
        one, other = (tx.make_engine("inprocess", engine=served) for _ in range(2))
        assert one.pause() and not other.pause() and not other.serving.is_set()
        other.resume()
        assert one.serving.is_set()
        run(one.update_model_weights_from_state_dict(policy.state_dict()))
        run(other.update_model_weights_from_state_dict({"bias": torch.ones(2)}))
        report = run(one.update_model_weights_from_state_dict({"weight": torch.ones(2, 3)}))
        assert not report.part and same(served, {"weight": torch.ones(2, 3), "bias": torch.ones(2)})

    def test_updates_at_the_same_time_queue_and_none_is_torn(self):
        served = nn.Linear(64, 64)
        others = [nn.Linear(64, 64).state_dict() for _ in range(6)]
        engine = tx.make_engine("inprocess", engine=served)

        async def together():
            return await asyncio.gather(*(engine.update_model_weights_from_state_dict(other) for other in others))

        reports = run(together())
        assert sorted(report.version for report in reports) == [1, 2, 3, 4, 5, 6]
        assert same(served, others[[report.version for report in reports].index(6)])


class TestEmbedded:
    @pytest.fixture
    def engine(self, place):
        made = EmbeddedEngine(str(place / "seed0"), dtype="float32")
        yield made
        made.close()

    def says(self, engine):
        (output,) = submitted(engine, 8).result(60)
        return list(output.token_ids)

    def test_checkpoint_switch_refuses_other_model_or_asleep_engine(self, engine, place):
        """A checkpoint path switches the weights; another model's checkpoint or a sleeping engine fails."""
        online = tx.make_engine("inprocess", engine=engine, pause_mode="wait")
        for seed in (1, 0):
            report = run(online.update_model_weights(place / f"seed{seed}"))
            assert report.verified and self.says(engine) == greedy(tiny_model(seed), PROMPT, 8)
        with pytest.raises(UpdateError, match=r"lm_head.*\[512, 64\]"):
            run(online.update_model_weights(place / "wide"))
        engine.sleep(1, "abort", 10)
        with pytest.raises(EngineError, match="asleep"):
            run(online.update_model_weights(place / "seed1"))
        engine.wake_up(None)
        assert self.says(engine) == greedy(tiny_model(0), PROMPT, 8)

    def test_other_senders_weights_need_whole_checkpoint_to_switch(self, engine, place, tmp_path, monkeypatch):
        """After another sender's update, a switch needs a whole checkpoint and a failed one restores nothing."""
        online, layer = tx.make_engine("inprocess", engine=engine), {"lm_head.weight": torch.zeros(512, 128)}
        trainer = tx.WeightSender(tx.make_transport("disk", root=tmp_path), tx.make_engine("inprocess", engine=engine))
        for before in ("nothing", "a switch"):
            trainer.update_weights(tiny_model(5))
            if before == "a switch":
                trainer.shutdown()
            with pytest.raises(UpdateError, match=r"another sender's weights.*whole checkpoint"):
                run(online.update_model_weights_from_state_dict(layer))
            assert self.says(engine) == greedy(tiny_model(5), PROMPT, 8)
            if before == "nothing":
                run(online.update_model_weights(place / "seed1"))
                assert self.says(engine) == greedy(tiny_model(1), PROMPT, 8)
        with monkeypatch.context() as patch:
            patch.setattr(TensorsLoader, "finish", lambda *_: (_ for _ in ()).throw(TransportError("it fails")))
            with pytest.raises(WeightSyncError, match="came from another sender and cannot be restored"):
                run(online.update_model_weights(place / "seed1"))
        assert engine.scheduler.paused
        run(online.update_model_weights(place / "seed1"))
        assert self.says(engine) == greedy(tiny_model(1), PROMPT, 8)

    def test_a_start_directory_that_was_saved_into_is_not_put_back(self, tmp_path, monkeypatch):
        tiny_checkpoint(tmp_path, 0)
        engine = EmbeddedEngine(str(tmp_path), dtype="float32")
        online = tx.make_engine("inprocess", engine=engine)
        tiny_checkpoint(tmp_path, 3)
        finish, failures = TensorsLoader.finish, [TransportError("it fails")]

        def failing(*args):
            if failures:
                raise failures.pop()
            finish(*args)

        monkeypatch.setattr(TensorsLoader, "finish", failing)
        with pytest.raises(UpdateError, match=r"it fails(.|\n)*could not be restored either: .*model\.safetensors"):
            run(online.update_model_weights_from_state_dict(tiny_model(1).state_dict()))
        assert engine.scheduler.paused
        run(online.update_model_weights(tmp_path))
        assert self.says(engine) == greedy(tiny_model(3), PROMPT, 8)
        engine.close()

    def test_one_layer_is_switched_alone_and_costs_one_layer(self, engine):
        online, model = tx.make_engine("inprocess", engine=engine), tiny_model(0)
        layer = {name: tensor for name, tensor in states(tiny_model(1)).items() if ".layers.1." in name}
        report = run(online.update_model_weights_from_state_dict(layer))
        assert report.part and report.bytes == sum(tensor.nbytes for tensor in layer.values())
        model.load_state_dict({**model.state_dict(), **layer})
        assert self.says(engine) == greedy(model, PROMPT, 8)

    @pytest.mark.parametrize("kept", [False, True])
    def test_frozen_request_keeps_kv_cache_only_with_keep_cache(self, engine, place, kept):
        """A frozen request goes on over its old KV cache with keep_cache, and recomputes it without."""
        online, frozen = tx.make_engine("inprocess", engine=engine, keep_cache=kept), pausing_in_the_fifth_pass(engine)
        old, new = tiny_model(0), tiny_model(1)
        running = submitted(engine, 24)
        assert frozen.wait(60)
        report = run(online.update_model_weights(place / "seed1"))
        (output,) = running.result(60)
        begun = greedy(old, PROMPT, 5)
        over_old_keys = greedy_over_kept_keys([old, new], [5], count=24)
        anew = begun + greedy(new, PROMPT + begun, 19)
        assert over_old_keys != anew  # else this test could not tell
        assert output.token_ids == (over_old_keys if kept else anew)
        assert [(span["version"], span["end"]) for span in output.spans] == [
            ("default", 5),
            (str(report.version), 24),
        ]
        assert self.says(engine) == greedy(new, PROMPT, 8)


class TestVLLM:
    """A stand-in for vLLM's `AsyncLLM`, in sleep mode."""

    @pytest.fixture
    def folders(self, tmp_path):
        for seed in (0, 1):
            (tmp_path / str(seed)).mkdir()
            save_file(states(net(seed)), tmp_path / str(seed) / "model.safetensors")
        return tmp_path

    def served(self, folders):
        llm = AsyncLLM(net(0))
        llm.vllm_config.model_config.model = str(folders / "0")
        return llm, tx.make_engine("inprocess", engine=llm)

    def test_a_start_directory_that_was_saved_into_is_not_put_back(self, folders):
        async def main():
            llm, engine = self.served(folders)
            save_file(states(net(5)), folders / "0" / "model.safetensors")
            llm.fake.inject("fail", "POST /update_weights")
            with pytest.raises(UpdateError, match=r"it fails here(.|\n)*could not be restored either: .*0/model\.safe"):
                await engine.update_model_weights(folders / "1")
            assert not llm.fake.serving and not same(llm.model, states(net(5)))

        run(main())

    def test_engine_serves_again_after_failed_pause(self, folders):
        """An engine whose pause fails before the load raises EngineRefusedError and serves again."""

        async def main():
            llm, engine = self.served(folders)
            llm.fake.inject("lose", "POST /pause")
            with pytest.raises(EngineRefusedError, match="it broke half-way; inprocess did not"):
                await asyncio.to_thread(engine.begin, 1)
            assert llm.fake.serving and engine.rows()[0].state == "serving"

        run(main())

    @pytest.mark.parametrize(("after", "sees"), [(1, False), (3, True), (10**9, False)])
    def test_drop_cached_retries_refused_resets_until_deadline(self, folders, after, sees):
        """The prefix cache is reset until vLLM agrees; refusals up to the deadline raise an error."""

        async def main():
            (llm, engine), asked = self.served(folders), []

            async def reset_prefix_cache(reset_running_requests, reset_connector):
                asked.append((reset_running_requests, reset_connector))
                return len(asked) >= after

            async def reset_encoder_cache():
                asked.append("encoder")

            llm.reset_prefix_cache, llm.reset_encoder_cache = reset_prefix_cache, reset_encoder_cache
            llm.vllm_config.model_config.multimodal_config = {} if sees else None
            engine.port.timeout_s = 10.0 if after < 10 else 0.1
            if after < 10:
                await asyncio.to_thread(engine.port.drop_cached)
                assert asked == [(True, True)] * after + ["encoder"] * sees
            else:
                with pytest.raises(EngineRefusedError, match="could not drop cached keys"):
                    await asyncio.to_thread(engine.port.drop_cached)

        run(main())

    def test_close_removes_workers_unless_called_on_engine_loop(self, folders):
        """close() makes workers leave, except on the engine's own event loop, where it would block."""

        async def main():
            llm, engine = self.served(folders)
            for seed, close in ((1, engine.close), (0, lambda: asyncio.to_thread(engine.close))):
                sender = tx.WeightSender(tx.make_transport("ipc"), engine)
                await asyncio.to_thread(sender.update_weights, net(seed))
                before = len(llm.fake.calls)
                left = close()
                if left is not None:
                    await left
                kinds = [call.body["init_info"]["kind"] for call in llm.fake.calls[before:]]
                assert kinds == ([] if left is None else ["leave"])
                assert same(llm.model, states(net(seed))) and llm.fake.serving
                await asyncio.to_thread(sender.shutdown)

        run(main())

    def test_calls_fail_at_once_after_engine_event_loop_ended(self, folders):
        """A call raises EngineUnreachableError when the AsyncLLM's event loop ends before or during it."""

        async def main():
            return self.served(folders)

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
