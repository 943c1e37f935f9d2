"""What the engine generates, and how pauses, sleep and failures treat what runs; no server in between."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchrl_ext as tx
from tests.engines.embedded import served_here
from tests.models import PROMPT, greedy, tiny_checkpoint, tiny_model
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import ConfigError, DeadlineError, EngineRefusedError, NotConnectedError
from torchrl_ext.base.messages import Start, Verify
from torchrl_ext.engines.embedded.engine import EmbeddedEngine
from torchrl_ext.engines.embedded.sampling import GenerateRequest, Sampling, pick
from torchrl_ext.engines.embedded.scheduler import Scheduler

CONTEXT = 256


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def model():
    return tiny_model(0, max_position_embeddings=CONTEXT)


@pytest.fixture
def engine(checkpoint):
    made = EmbeddedEngine(str(checkpoint), dtype="float32")
    yield made
    made.close()


def request(prompt=PROMPT, **sampling):
    settings = {"temperature": 0, "max_tokens": 16, "ignore_eos": True, **sampling}
    return GenerateRequest.from_json({"token_ids": prompt, "sampling_params": settings}, "request")


def submit(engine, prompt=PROMPT, **sampling):
    return engine.scheduler.submit(request(prompt, **sampling)).future


def generate(engine, prompt=PROMPT, **sampling):
    return submit(engine, prompt, **sampling).result(60)


@contextmanager
def scheduling(model, *, end_ids=frozenset(), **settings):
    scheduler = Scheduler(model, end_ids=end_ids, vocabulary=512, context=CONTEXT, **settings)
    try:
        yield scheduler
    finally:
        scheduler.stop()


def runs(engine, passes, *beside):
    """Jobs of a request that ran for so many passes, and of those ``beside`` it; the next pass waits for a pause."""
    counted, reached = [], threading.Event()

    def hook(*_):
        counted.append(None)
        if len(counted) == passes + 1:
            reached.set()
            Deadline(60).poll(lambda: engine.scheduler._state != "serving", "nobody paused")

    engine._model.register_forward_pre_hook(hook)
    jobs = [engine.scheduler.submit(one) for one in (request(), *beside)]
    assert reached.wait(60)
    return jobs


class TestTokens:
    def test_greedy_tokens_equal_transformers_for_mixed_lengths(self, engine, model):
        asked = [(PROMPT[:length], 24 - place) for place, length in enumerate((1, 8, 3, 3, 5, 2, 8))]
        running = [submit(engine, prompt, max_tokens=count) for prompt, count in asked]
        for (prompt, count), future in zip(asked, running, strict=True):
            (sequence,) = future.result(60)
            assert sequence.token_ids == greedy(model, prompt, count)
            assert sequence.spans == [{"version": "default", "start": 0, "end": count}]

    def test_a_seeded_sample_does_not_depend_on_what_else_runs(self, engine):
        (alone,) = generate(engine, temperature=1.0, seed=5)
        crowd = [submit(engine, prompt, temperature=1.0, seed=5, n=4) for prompt in (PROMPT, PROMPT[:3], PROMPT[:5])]
        samples = crowd[0].result(60)
        assert samples[0].token_ids == alone.token_ids
        assert len({tuple(sample.token_ids) for sample in samples}) == 4
        for future in crowd:
            future.result(60)

    def test_generation_ends_at_stop_token_or_context_length(self, engine, model):
        expected = greedy(model, PROMPT, 16)
        stop = expected[5]
        (sequence,) = generate(engine, stop_token_ids=[stop])
        assert sequence.token_ids == expected[: expected.index(stop) + 1]
        assert (sequence.finish_reason, sequence.stop_reason) == ("stop", stop)
        (sequence,) = generate(engine, stop_token_ids=[stop], min_tokens=16)
        assert len(sequence.token_ids) == 16 and stop not in sequence.token_ids[:-1]
        (sequence,) = generate(engine, max_tokens=None)
        assert (len(sequence.token_ids), sequence.finish_reason) == (CONTEXT - len(PROMPT), "length")

    def test_eos_token_ends_generation_unless_ignored_or_too_early(self, model):
        expected = greedy(model, PROMPT, 16)
        end = expected[3]
        with scheduling(model, end_ids=frozenset({end})) as scheduler:
            (sequence,) = scheduler.submit(request(ignore_eos=False)).future.result(60)
            assert sequence.token_ids == expected[: expected.index(end) + 1]
            assert (sequence.finish_reason, sequence.stop_reason) == ("stop", None)
            (sequence,) = scheduler.submit(request(ignore_eos=False, min_tokens=10)).future.result(60)
            assert len(sequence.token_ids) >= 10 and end not in sequence.token_ids[:10]
            (sequence,) = scheduler.submit(request()).future.result(60)
            assert sequence.token_ids == expected

    @given(data=st.data())
    def test_a_token_that_is_drawn_is_one_that_the_settings_leave(self, data):
        numbers = st.integers(-4000, 4000).map(lambda number: number / 1000)  # far enough apart to be in one order
        logits = torch.tensor(data.draw(st.lists(numbers, min_size=6, max_size=6, unique=True)))
        setting = Sampling(
            temperature=data.draw(st.sampled_from((0.0, 0.5, 1.0, 3.0))),
            top_k=data.draw(st.integers(-1, 7)),
            top_p=data.draw(st.sampled_from((0.1, 0.5, 0.9, 1.0))),
            min_p=data.draw(st.sampled_from((0.0, 0.2, 1.0))),
        )
        barred = data.draw(st.sampled_from(((), (int(logits.argmax()),))))
        token, entry = pick(logits, setting, torch.Generator().manual_seed(data.draw(st.integers(0, 99))), barred)
        assert entry is None and token not in barred
        row = logits.double()
        row[list(barred)] = -torch.inf
        order = row.argsort(descending=True).tolist()
        if setting.temperature == 0:
            assert token == order[0]
            return
        share = (row / setting.temperature).softmax(-1)
        place = order.index(token)
        left = share[order[: setting.top_k if setting.top_k > 0 else None]]
        assert place < len(left) and share[token] >= setting.min_p * share[order[0]] * (1 - 1e-9)
        assert left[:place].sum() / left.sum() < setting.top_p + 1e-9

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            ([], "Expected `object`, got `array`"),
            ({"token_ids": [], "sampling_params": {}}, "token_ids"),
            ({"token_ids": [True], "sampling_params": {}}, r"got `bool` - at `\$.token_ids\[0\]`"),
            ({"token_ids": [1]}, "missing required field `sampling_params`"),
            ({"token_ids": [99_999], "sampling_params": {}}, "no token 99999"),
            ({"token_ids": [1], "sampling_params": {"stop_token_ids": [99_999]}}, "no token 99999"),
            ({"token_ids": [1] * CONTEXT, "sampling_params": {}}, "at most 255"),
            ({"token_ids": [1], "sampling_params": {"stop": ["x"]}}, "stop is not supported"),
            ({"token_ids": [1], "sampling_params": {"temperature": -1}}, "Expected `float` >= 0.0 - at .*temperature"),
            ({"token_ids": [1], "sampling_params": {}, "stream": True}, "does not stream"),
            ({"token_ids": [1], "sampling_params": {}, "output_mode": "text"}, "output_mode"),
        ],
    )
    def test_unservable_request_is_refused_with_reason(self, engine, body, words):
        with pytest.raises(ConfigError, match=words):
            engine.scheduler.submit(GenerateRequest.from_json(body, "request"))

    def test_text_settings_and_empty_settings_are_ignored(self):
        read = request(detokenize=True, stop=None, seed=None, presence_penalty=0.0)
        assert read.sampling == Sampling(temperature=0.0, max_tokens=16, ignore_eos=True)


class TestPauses:
    def test_wait_pause_finishes_old_requests_and_holds_new_ones(self, engine):
        running = [submit(engine, max_tokens=40) for _ in range(70)]  # more than fit one pass
        with ThreadPoolExecutor(2) as callers:  # a second one does not cut the first one's wait short
            list(callers.map(lambda _: engine.pause("wait", 60), range(2)))
        assert all(future.done() for future in running) and engine.scheduler.running == 0
        later = submit(engine)
        assert not later.done()
        engine.resume()
        assert len(later.result(60)[0].token_ids) == 16

    def test_wait_freezes_what_does_not_end_in_time(self, engine):
        running = runs(engine, 2)[0].future
        with pytest.raises(DeadlineError, match=r"still running 0 s after.*frozen"):
            engine.pause("wait", 0)
        assert engine.scheduler.paused and not running.done()
        engine.resume()
        assert len(running.result(60)[0].token_ids) == 16

    def test_abort_pause_ends_running_and_waiting_requests(self, engine, model):
        running, aside = (job.future for job in runs(engine, 5, request(PROMPT[:3], n=2)))
        engine.pause("keep", 10)
        waiting = submit(engine)
        engine.pause("abort", 10)
        (sequence,) = running.result(0)
        assert sequence.finish_reason == "abort" and 0 < len(sequence.token_ids) < 16
        assert sequence.token_ids == greedy(model, PROMPT, 16)[: len(sequence.token_ids)]
        assert waiting.result(0)[0].token_ids == [] and len(aside.result(0)) == 2
        with pytest.raises(ConfigError, match="no pause mode 'nap'"):
            engine.pause("nap", 1)

    def test_a_pass_that_fails_fails_its_requests_and_no_other(self, engine, model):
        hook = engine._model.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generate(engine)
        hook.remove()
        assert generate(engine)[0].token_ids == greedy(model, PROMPT, 16) and engine.scheduler.alive

    def test_the_end_of_the_engine_ends_what_runs(self, checkpoint):
        engine = EmbeddedEngine(str(checkpoint), dtype="float32")
        running = runs(engine, 3)[0].future
        engine.close()
        assert running.result(60)[0].finish_reason == "abort" and not engine.scheduler.alive
        engine.pause("keep", 1)
        engine.resume()
        assert engine.scheduler.paused


class TestSleep:
    @pytest.mark.parametrize(("level", "asleep"), [(0, set()), (1, {"weights", "kv_cache"})])
    def test_frozen_requests_survive_a_sleep_that_keeps_the_weights(self, engine, model, level, asleep):
        running = runs(engine, 5)[0].future
        engine.sleep(level, "keep", 10)
        assert engine.asleep == asleep and engine.scheduler.paused
        if level:
            with pytest.raises(EngineRefusedError, match="is asleep"):
                engine.resume()
            assert not engine.wake_up(["kv_cache"]) and engine.scheduler.paused
        assert engine.wake_up(None)
        assert running.result(60)[0].token_ids == greedy(model, PROMPT, 16)

    def test_engine_slept_at_level_2_refuses_until_an_update(self, engine, model):
        engine.sleep(2, "abort", 10)
        for refused in (engine.digests, lambda: engine.logprobs([PROMPT]), lambda: engine.wake_up(None)):
            with pytest.raises(EngineRefusedError, match="slept at level 2"):
                refused()
        assert not engine.wake_up(["weights", "scheduling"])
        with served_here(engine) as server, tx.WeightSender(tx.make_transport("ipc"), tx.connect(server.url)) as sender:
            sender.update_weights(model)
            assert engine.wake_up(["kv_cache"])
            assert generate(engine)[0].token_ids == greedy(model, PROMPT, 16) and engine.scheduler.version == "1"

    def test_steps_out_of_order_are_refused_and_change_nothing(self, engine, model):
        with pytest.raises(EngineRefusedError, match="in use"):
            engine.release_kv_cache()
        with pytest.raises(EngineRefusedError, match="while the engine generates"):
            engine.handle(Start())
        with pytest.raises(ConfigError, match=r"no tags \['cpu'\]"):
            engine.wake_up(["cpu"])
        with pytest.raises(ConfigError, match="0 tokens"):
            engine.logprobs([[]])
        with pytest.raises(ConfigError, match="no token 512"):
            engine.logprobs([[512]])
        engine.pause("keep", 10)
        with pytest.raises(NotConnectedError, match="no weight update is open"):
            engine.handle(Verify(digests={}))
        engine.release_kv_cache()
        assert engine.asleep == {"kv_cache"} and engine.wake_up(["kv_cache"])
        assert generate(engine)[0].token_ids == greedy(model, PROMPT, 16)

    def test_a_control_call_that_waits_too_long_for_another_says_so(self, engine, monkeypatch):
        monkeypatch.setattr("torchrl_ext.engines.embedded.engine._BUSY_S", 0.01)
        with engine._control, pytest.raises(DeadlineError, match="another control call"):
            engine.resume()
