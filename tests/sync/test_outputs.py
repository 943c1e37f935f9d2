"""Outputs as proof: engines whose log-probabilities are not the trainer's do not serve, and reports say how far off."""

import json
import math
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import torchrl_ext as tx
from tests.engines.embedded import EmbeddedServer
from tests.models import VOCAB, tiny_checkpoint, tiny_model
from torchrl_ext.base.errors import ConfigError, EngineRefusedError, UpdateError
from torchrl_ext.base.reports import PROOFS, least
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.control.engine import Engine
from torchrl_ext.control.fleet import Fleet
from torchrl_ext.control.http import HTTPSession
from torchrl_ext.control.makes.vllm import EmbeddedPort
from torchrl_ext.sync.local.inprocess import InProcessEngine
from torchrl_ext.sync.outputs import Probe, bound_of, gaps, random_prompts, score


@contextmanager
def sending(*engines, transport="memory", **settings):
    """A sender to engines of this process or another one."""
    engine = engines[0] if len(engines) == 1 else Fleet(engines)
    sender = tx.WeightSender(tx.make_transport(transport), engine, **{"verify": "outputs", **settings})
    try:
        yield sender
    finally:
        sender.shutdown()


class Lying:
    """A module that holds the right weights and computes other outputs, as long as it is told to."""

    def __init__(self, url="liar", by=0.3, seed=90):
        self.model = tiny_model(seed)
        self.engine, self.by = InProcessEngine(self.model, url=url), by
        self.lying = True
        self.model.lm_head.register_forward_hook(self._change)

    def _change(self, module, inputs, logits):
        if not self.lying:
            return None
        changed = logits.clone()
        changed[..., 0::2] += self.by
        return changed


def hand_made(model, prompts):
    """Log-probabilities the long way round: one position after the other, from the logits of what is before it."""
    found = []
    for prompt in prompts:
        row = []
        for end in range(1, len(prompt)):
            with torch.no_grad():
                logits = model(torch.tensor([prompt[:end]])).logits[0, -1].double()
            row.append((logits[prompt[end]] - logits.logsumexp(0)).item())
        found.append(row)
    return found


class TestScore:
    def test_score_equals_log_probability_of_each_next_token(self):
        """The score of a token is the model's log-probability of this token after the preceding tokens."""
        model, prompts = tiny_model(5), random_prompts(VOCAB, sequences=3, tokens=9)
        largest, mean = gaps(hand_made(model, prompts), score(model, prompts))
        assert 0 <= mean <= largest < 1e-4
        probable = [row for row in score(model, prompts)[0] if row > math.log(0.5)]
        assert not probable  # random tokens: none of them is the best one

    def test_score_uses_eval_mode_and_restores_module_modes(self):
        """Scoring runs in evaluation mode and restores the training mode of every module."""
        model = tiny_model(5, attention_dropout=0.5).train()
        model.model.layers[0].eval()
        prompts = random_prompts(VOCAB)
        assert score(model, prompts) == score(model, prompts)
        assert model.training and model.model.layers[1].training and not model.model.layers[0].training
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_what_is_no_causal_model_is_refused_by_name(self):
        with pytest.raises(ConfigError, match=r"Linear computes no log-probabilities.*probe="):
            score(nn.Linear(2, 2), [[1, 2]])


class TestGaps:
    def test_they_are_the_largest_and_the_mean_difference(self):
        largest, mean = gaps([[-1.0, -2.0], [-3.0]], [[-1.5, -2.0], [-2.75]])
        assert (largest, mean) == (0.5, 0.25)

    @pytest.mark.parametrize("strange", [math.nan, -math.inf])
    def test_what_is_no_number_is_infinitely_far_off(self, strange):
        assert gaps([[-1.0, -2.0]], [[strange, -2.0]]) == (math.inf, math.inf)
        assert gaps([[strange, -2.0]], [[strange, -2.0]]) == (math.inf, math.inf)

    def test_answers_about_other_tokens_are_refused(self):
        with pytest.raises(ConfigError, match=r"\[1\].*Expected: \[2\]"):
            gaps([[-1.0, -2.0]], [[-1.0]])

    def test_the_bound_goes_by_the_coarsest_dtype_that_travels(self):
        def bound(*dtypes):
            return bound_of([ParamMeta("w", dtype, (1,)) for dtype in dtypes])

        assert bound(torch.float32) == bound(torch.float32, torch.int64) == 1e-3
        assert bound(torch.float32, torch.bfloat16) == 1.0
        assert bound(torch.float16) == 0.1
        assert bound(torch.float8_e4m3fn, torch.bfloat16) == 2.0


class TestProbe:
    def test_its_tokens_are_the_models_and_the_same_each_time(self):
        prompts = random_prompts(VOCAB)
        assert prompts == random_prompts(VOCAB) != random_prompts(VOCAB, seed=1)
        assert [len(prompt) for prompt in prompts] == [16, 16]
        assert all(0 <= token < VOCAB for prompt in prompts for token in prompt)

    def test_probe_function_with_wrong_result_shape_ends_the_update(self):
        """A probe function that returns the wrong number of rows ends the update before any engine is paused."""
        engine = InProcessEngine(tiny_model(0))
        with sending(engine, probe=lambda prompts: [[-1.0]]) as sender:
            with pytest.raises(UpdateError, match=r"\[1\] log-probabilities.*\[15, 15\]"):
                sender.update_weights(tiny_model(1))
            assert engine.serving.is_set() and engine.rows()[0].version is None

    def test_registered_model_scores_updates_from_plain_tensors(self):
        """An update from a dict of tensors is scored by the registered model and refused without one."""
        policy = tiny_model(4)
        with sending(InProcessEngine(tiny_model(0))) as sender:
            with pytest.raises(UpdateError, match=r"does not report the size of its vocabulary.*Probe\("):
                sender.update_weights(dict(policy.state_dict()))
            sender.register_model(policy)
            assert sender.update_weights(dict(policy.state_dict())).engines[0].max_gap < 1e-5

    def test_prompts_without_a_second_token_are_refused(self):
        with pytest.raises(ConfigError, match="at least two"):
            Probe(prompts=((1,),))


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"verify": "digests"}, "'digests'.*'outputs'"),
            ({"verify": True, "max_gap": 0.1}, "verify='outputs'"),
            ({"verify": False, "probe": list}, "verify='outputs'"),
            ({"verify": "outputs", "max_gap": -1.0}, "at least 0"),
            ({"verify": "outputs", "max_gap": math.nan}, "at least 0"),
            ({"verify": "outputs", "max_gap": "none"}, "'dtype'"),
        ],
    )
    def test_what_cannot_work_is_refused_at_once(self, settings, said):
        with pytest.raises(ConfigError, match=said):
            tx.WeightSender(tx.make_transport("memory"), InProcessEngine(tiny_model(0)), **settings)

    def test_without_it_nobody_is_asked_and_rows_have_no_gap(self):
        with sending(InProcessEngine(nn.Linear(2, 2)), verify=True) as sender:
            report = sender.update_weights(nn.Linear(2, 2))
        assert (report.engines[0].max_gap, report.engines[0].mean_gap) == (None, None)
        assert "probe" not in report.spans


class TestReport:
    def test_every_update_reports_gaps_and_probe_time(self):
        """Each report has the gaps of its engine and the time that the probe took."""
        with sending(InProcessEngine(tiny_model(0))) as sender:
            for seed in (1, 2, 3):
                report = sender.update_weights(tiny_model(seed))
                (row,) = report.engines
                assert 0 <= row.mean_gap <= row.max_gap < 1e-5
                assert row.state == "serving" and report.verified
                assert 0 < report.spans["probe"] <= report.spans["total"]
                assert row.proof == "outputs"

    def test_gaps_without_bound_are_reported_but_never_refused(self):
        """Without max_gap any gap is reported and none is refused; an infinite gap survives JSON."""
        liar = Lying(by=math.nan)
        with sending(liar.engine, max_gap=None) as sender:
            report = sender.update_weights(tiny_model(1))
        (row,) = report.engines
        assert (row.max_gap, row.state, row.error) == (math.inf, "serving", None) and row.proof != "outputs"
        told = json.loads(json.dumps(report.to_json(), allow_nan=False))["engines"][0]
        assert float(told["max_gap"]) == math.inf

    def test_a_given_bound_counts_and_not_the_dtypes(self):
        liar = Lying(by=0.3)
        with sending(liar.engine, max_gap=0.5) as sender:
            assert sender.update_weights(tiny_model(1)).engines[0].state == "serving"
        with sending(liar.engine, max_gap=0.01) as sender, pytest.raises(UpdateError, match=r"max_gap is 0\.01"):
            sender.update_weights(tiny_model(1))


class TestLiars:
    @pytest.mark.parametrize(("by", "far"), [(0.3, r"max_gap is 0\.001"), (math.nan, "not all finite")])
    def test_engine_with_wrong_outputs_is_paused_until_a_good_update(self, by, far):
        """An engine whose outputs differ from the trainer's stays paused until an update with equal outputs."""
        liar = Lying(by=by)
        with sending(liar.engine) as sender:
            with pytest.raises(UpdateError, match=f"liar computes other outputs.*{far}") as told:
                sender.update_weights(tiny_model(1))
            (row,) = told.value.rows
            assert (row.state, row.version) == ("paused", 1) and row.max_gap > 1e-3
            assert "computes other outputs" in row.error and "others serve" not in str(told.value)
            assert told.value.report.engines == told.value.rows and not told.value.report.verified
            assert not liar.engine.serving.is_set() and sender.version == 0
            liar.lying = False
            report = sender.update_weights(tiny_model(2))
            assert report.engines[0].state == "serving" and report.engines[0].error is None
            assert liar.engine.serving.is_set() and report.version == 2

    def test_of_a_fleet_the_liar_alone_is_paused(self):
        honest, liar = InProcessEngine(tiny_model(0), url="honest"), Lying()
        with sending(honest, liar.engine) as sender:
            with pytest.raises(UpdateError, match="liar computes other outputs") as told:
                sender.update_weights(tiny_model(1))
            first, second = told.value.rows
            assert (first.state, first.error) == ("serving", None) and first.max_gap < 1e-5
            assert second.state == "paused" and second.max_gap > 1e-3
            assert "honest computes" not in str(told.value)
            assert honest.serving.is_set() and not liar.engine.serving.is_set()
            assert first.proof == "outputs" != second.proof
            liar.lying = False
            report = sender.update_weights(tiny_model(2))
            assert {row.state for row in report.engines} == {"serving"}
            assert all(row.max_gap < 1e-5 for row in report.engines) and liar.engine.serving.is_set()

    def test_those_that_serve_are_asked_also_when_another_one_failed(self):
        class Refusing(InProcessEngine):
            def load(self, info, on_failure=lambda: None):
                raise RuntimeError("out of memory")

        honest, liar = InProcessEngine(tiny_model(0), url="honest"), Lying()
        broken = Refusing(tiny_model(0), url="broken")
        fleet = sending(honest, liar.engine, broken)
        with fleet as sender, pytest.raises(UpdateError, match="out of memory") as told:
            sender.update_weights(tiny_model(1))
        assert [row.state for row in told.value.rows] == ["serving", "paused", "paused"]
        assert [row.max_gap is None for row in told.value.rows] == [False, False, True]
        assert "computes other outputs" in told.value.rows[1].error

    @pytest.mark.parametrize(("kind", "traced"), [(RuntimeError, True), (EngineRefusedError, False)])
    def test_an_engine_that_gives_no_answer_is_paused(self, kind, traced, caplog):
        class Silent(InProcessEngine):
            def logprobs(self, prompts):
                if prompts:
                    raise kind("no room for another request")
                return []

        engine = Silent(tiny_model(0), url="silent")
        with sending(engine) as sender, pytest.raises(UpdateError, match=r"silent gave no log-prob.*no room") as told:
            sender.update_weights(tiny_model(1))
        assert told.value.rows[0].state == "paused" and told.value.rows[0].max_gap is None
        (record,) = [one for one in caplog.records if "silent gave no log-prob" in one.getMessage()]
        assert bool(record.exc_info) == traced and "no room" in record.getMessage()

    def test_engine_without_logprobs_is_refused_and_keeps_serving(self):
        """An engine that computes no log-probabilities is refused and keeps serving its previous weights."""

        class Mute(InProcessEngine):
            logprobs = tx.EngineClient.logprobs

        engine = Mute(tiny_model(0))
        with sending(engine) as sender, pytest.raises(UpdateError, match="computes no log-probabilities"):
            sender.update_weights(tiny_model(1))
        assert engine.serving.is_set() and engine.rows()[0].version is None


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with EmbeddedServer(tiny_checkpoint(tmp_path_factory.mktemp("model")), dtype="float32") as running:
        yield running


class TestEmbedded:
    def test_it_says_what_the_trainer_says_serving_or_paused(self, server):
        engine, model = tx.make_engine("embedded", url=server.url), tiny_model(7)
        with sending(engine, transport="ipc") as sender:
            (row,) = sender.update_weights(model).engines
            assert row.kind == "embedded" and 0 <= row.mean_gap <= row.max_gap < 1e-5
            prompts = random_prompts(VOCAB, seed=3)
            serving = engine.logprobs(prompts)
            engine.pause()
            assert engine.logprobs(prompts) == serving
            engine.resume()
        assert gaps(hand_made(model, prompts), serving)[0] < 1e-4

    @pytest.mark.parametrize(
        ("step", "said"),
        [("resume", "did not resume with version 1"), ("logprobs", "gave no log-probabilities")],
    )
    def test_a_server_that_died_is_unreachable(self, step, said, tmp_path):
        released = []

        class Dying(EmbeddedPort):
            def resume(self):
                super().resume()
                released.append(True)
                if step == "resume":
                    server.stop()

            def logprobs(self, prompts):
                if released and step == "logprobs":
                    server.stop()
                return super().logprobs(prompts)

        server = EmbeddedServer(tiny_checkpoint(tmp_path / "model"), dtype="float32")
        with server, sending(Engine(Dying(HTTPSession(server.url))), transport="ipc") as sender:
            with pytest.raises(UpdateError, match=said) as told:
                sender.update_weights(tiny_model(1))
            assert told.value.rows[0].state == "unreachable"

    @pytest.mark.parametrize(
        ("prompts", "said"),
        [([[1, VOCAB]], "has no token"), ([[]], "0 tokens"), ([[1] * 600], "600 tokens"), ([["a"]], "Expected `int`")],
    )
    def test_prompts_that_are_none_are_refused(self, server, prompts, said):
        engine = tx.make_engine("embedded", url=server.url)
        with pytest.raises(tx.WeightSyncError, match=said):
            engine.logprobs(prompts)
        engine.close()


def test_weakest_of_several_proofs_is_reported():
    for at, proof in enumerate(PROOFS):
        assert least(PROOFS[at:]) == least(reversed(PROOFS[at:])) == proof
    assert least(()) == least((PROOFS[-1], "of another release")) == "sent"
