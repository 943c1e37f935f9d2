"""Outputs as proof: engines whose log-probabilities are not the trainer's do not serve, and reports say how far off."""

import json
import math
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import torchrl_ext as tx
from tests.models import VOCAB, tiny_model
from tests.sync.ends import before, digests
from torchrl_ext.base.errors import ConfigError, EngineRefusedError, EngineUnreachableError, UpdateError
from torchrl_ext.base.reports import PROOFS, least
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.control.fleet import Fleet
from torchrl_ext.sync.local.inprocess import InProcessEngine
from torchrl_ext.sync.outputs import Probe, bound_of, gaps, random_prompts, score


@contextmanager
def sending(*engines, transport="memory", **settings):
    """A sender to engines of this process or another one."""
    engine = engines[0] if len(engines) == 1 else Fleet(engines)
    with tx.WeightSender(tx.make_transport(transport), engine, **{"verify": "outputs", **settings}) as sender:
        yield sender


class Lying:
    """A module that holds the right weights and computes other outputs, as long as it is told to."""

    def __init__(self, by=0.3):
        model = tiny_model(90)
        self.engine, self.by, self.lying = InProcessEngine(model, url="liar"), by, True
        model.lm_head.register_forward_hook(self._change)

    def _change(self, module, inputs, logits):
        changed = logits.clone()
        changed[..., 0::2] += self.by if self.lying else 0.0
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


def test_where_engines_serve_all_the_time_the_first_one_tries_a_version(tmp_path):
    """The others keep the version before, and so does the first one in the end."""
    liar, policy = Lying(), tiny_model(3)
    liar.lying = False
    engines = [liar.engine, InProcessEngine(tiny_model(91), url="second")]
    for engine in engines:
        engine._object.live = True
    transport = tx.make_transport("delta", root=tmp_path)
    with tx.WeightSender(transport, Fleet(engines), verify="outputs") as sender:
        for liar.lying in (False, False, True, False):
            with torch.no_grad():
                policy.lm_head.weight[::5] += 0.25
            sender.register_model(policy)
            if not liar.lying:
                report = sender.update_weights()
                assert report.proof == "outputs" and all(row.max_gap < 1e-3 for row in report.engines)
                continue
            held = {engine.url: digests(engine._object._module.target) for engine in engines}
            with pytest.raises(UpdateError, match="computes other outputs than the trainer") as told:
                sender.update_weights()
            assert {(row.state, row.version) for row in told.value.rows} == {("serving", 2)}
            assert {engine.url: digests(engine._object._module.target) for engine in engines} == held


class TestScore:
    def test_score_equals_log_probability_of_each_next_token(self):
        model, prompts = tiny_model(5), random_prompts(VOCAB, sequences=3, tokens=9)
        largest, mean = gaps(hand_made(model, prompts), score(model, prompts))
        assert 0 <= mean <= largest < 1e-4
        assert max(score(model, prompts)[0]) < math.log(0.5)  # random tokens: none of them is the best one

    def test_score_uses_eval_mode_and_restores_module_modes(self):
        model, prompts = tiny_model(5, attention_dropout=0.5).train(), random_prompts(VOCAB)
        model.model.layers[0].eval()
        assert score(model, prompts) == score(model, prompts)
        assert model.training and model.model.layers[1].training and not model.model.layers[0].training
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_what_is_no_causal_model_is_refused_by_name(self):
        with pytest.raises(ConfigError, match=r"Linear computes no log-probabilities.*probe="):
            score(nn.Linear(2, 2), [[1, 2]])


class TestGaps:
    @pytest.mark.parametrize(
        ("trainer", "engine", "expected"),
        [
            ([[-1.0, -2.0], [-3.0]], [[-1.5, -2.0], [-2.75]], (0.5, 0.25)),
            ([[-1.0, -2.0]], [[math.nan, -2.0]], (math.inf, math.inf)),
            ([[-1.0, -2.0]], [[-math.inf, -2.0]], (math.inf, math.inf)),
            ([[-math.inf, -2.0]], [[-math.inf, -2.0]], (math.inf, math.inf)),
        ],
    )
    def test_they_are_the_largest_and_the_mean_difference(self, trainer, engine, expected):
        assert gaps(trainer, engine) == expected

    def test_answers_about_other_tokens_are_refused(self):
        with pytest.raises(ConfigError, match=r"\[1\].*Expected: \[2\]"):
            gaps([[-1.0, -2.0]], [[-1.0]])

    def test_the_bound_goes_by_the_coarsest_dtype_that_travels(self):
        for dtypes, bound in {
            (torch.float32,): 1e-3,
            (torch.float32, torch.int64): 1e-3,
            (torch.float32, torch.bfloat16): 1.0,
            (torch.float16,): 0.1,
            (torch.float8_e4m3fn, torch.bfloat16): 2.0,
        }.items():
            assert bound_of([ParamMeta("w", dtype, (1,)) for dtype in dtypes]) == bound


class TestProbe:
    def test_probe_function_with_wrong_result_shape_ends_the_update(self):
        engine = InProcessEngine(tiny_model(0))
        with sending(engine, probe=lambda prompts: [[-1.0]]) as sender:
            with pytest.raises(UpdateError, match=r"\[1\] log-probabilities.*\[15, 15\]"):
                sender.update_weights(tiny_model(1))
            assert engine.serving.is_set() and engine.look()[0].version is None

    def test_registered_model_scores_updates_from_plain_tensors(self):
        policy = tiny_model(4)
        with sending(InProcessEngine(tiny_model(0))) as sender:
            with pytest.raises(UpdateError, match=r"does not report the size of its vocabulary.*Probe\("):
                sender.update_weights(dict(policy.state_dict()))
            sender.register_model(policy)
            assert sender.update_weights(dict(policy.state_dict())).engines[0].max_gap < 1e-5

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"verify": "digests"}, "'digests'.*'outputs'"),
            ({"verify": True, "max_gap": 0.1}, "verify='outputs'"),
            ({"verify": False, "probe": list}, "verify='outputs'"),
            ({"max_gap": -1.0}, "at least 0"),
            ({"max_gap": math.nan}, "at least 0"),
            ({"max_gap": "none"}, "'dtype'"),
        ],
    )
    def test_what_cannot_work_is_refused_at_once(self, settings, said):
        with pytest.raises(ConfigError, match=said), sending(InProcessEngine(nn.Linear(2, 2)), **settings):
            pass
        with pytest.raises(ConfigError, match="at least two"):
            Probe(prompts=((1,),))


class TestReport:
    def test_gaps_within_a_bound_or_without_one_are_reported(self):
        with sending(Lying().engine, max_gap=0.5) as sender:
            assert sender.update_weights(tiny_model(1)).engines[0].state == "serving"
        with sending(Lying(math.nan).engine, max_gap=None) as sender:
            report = sender.update_weights(tiny_model(1))
        (row,) = report.engines
        assert (row.max_gap, row.state, row.error) == (math.inf, "serving", None) and row.proof != "outputs"
        told = json.loads(json.dumps(report.to_json(), allow_nan=False))["engines"][0]
        assert float(told["max_gap"]) == math.inf

    def test_weakest_of_several_proofs_is_reported(self):
        for at, proof in enumerate(PROOFS):
            assert least(PROOFS[at:]) == least(reversed(PROOFS[at:])) == proof
        assert least(()) == least((PROOFS[-1], "of another release")) == "sent"


class TestLiars:
    @pytest.mark.parametrize(
        ("by", "bound", "far"),
        [
            (0.3, "dtype", r"max_gap is 0\.001"),
            (0.3, 0.01, r"max_gap is 0\.01"),
            (math.nan, "dtype", "not all finite"),
        ],
    )
    def test_engine_with_wrong_outputs_is_paused_until_a_good_update(self, by, bound, far):
        honest, liar = InProcessEngine(tiny_model(0), url="honest"), Lying(by)
        with sending(honest, liar.engine, max_gap=bound) as sender:
            with pytest.raises(UpdateError, match=f"liar computes other outputs.*{far}") as told:
                sender.update_weights(tiny_model(1))
            first, second = told.value.rows
            assert (first.state, first.error, first.proof) == ("serving", None, "outputs") and first.max_gap < 1e-5
            assert (second.state, second.version) == ("paused", 1) and second.max_gap > 1e-3
            assert "computes other outputs" in second.error and second.proof != "outputs"
            assert "honest computes" not in str(told.value)
            assert told.value.report.engines == told.value.rows and not told.value.report.verified
            assert honest.serving.is_set() and not liar.engine.serving.is_set() and sender.version == 0
            liar.lying = False
            report = sender.update_weights(tiny_model(2))
            assert {(row.state, row.version, row.error) for row in report.engines} == {("serving", 2, None)}
            assert all(row.max_gap < 1e-5 for row in report.engines) and liar.engine.serving.is_set()

    def test_those_that_serve_are_asked_also_when_another_one_failed(self):
        def fails():
            raise RuntimeError("out of memory")

        fleet = (
            InProcessEngine(tiny_model(0), url="honest"),
            Lying().engine,
            InProcessEngine(tiny_model(0), url="broken"),
        )
        before(fleet[2], "load", fails)
        with sending(*fleet) as sender, pytest.raises(UpdateError, match="out of memory") as told:
            sender.update_weights(tiny_model(1))
        assert [row.state for row in told.value.rows] == ["serving", "paused", "paused"]
        assert [row.max_gap is None for row in told.value.rows] == [False, False, True]
        assert "computes other outputs" in told.value.rows[1].error

    @pytest.mark.parametrize(
        ("kind", "traced", "state"),
        [
            (RuntimeError, True, "paused"),
            (EngineRefusedError, False, "paused"),
            (EngineUnreachableError, False, "unreachable"),
        ],
    )
    def test_an_engine_that_gives_no_answer_is_paused(self, kind, traced, state, caplog):
        class Silent(InProcessEngine):
            def logprobs(self, prompts):
                if prompts:
                    raise kind("no room for another request")
                return []

            def pause(self):
                if state == "unreachable":
                    raise kind("it is gone")
                return super().pause()

        engine = Silent(tiny_model(0), url="silent")
        with sending(engine) as sender, pytest.raises(UpdateError, match=r"silent gave no log-prob.*no room") as told:
            sender.update_weights(tiny_model(1))
        assert told.value.rows[0].state == state and told.value.rows[0].max_gap is None
        (record,) = [one for one in caplog.records if "silent gave no log-prob" in one.getMessage()]
        assert bool(record.exc_info) == traced and "no room" in record.getMessage()

    def test_engine_without_logprobs_is_refused_and_keeps_serving(self):
        class Mute(InProcessEngine):
            logprobs = tx.EngineClient.logprobs

        engine = Mute(tiny_model(0))
        with sending(engine) as sender, pytest.raises(UpdateError, match="computes no log-probabilities"):
            sender.update_weights(tiny_model(1))
        assert engine.serving.is_set() and engine.look()[0].version is None


class TestEmbedded:
    def test_it_says_what_the_trainer_says_serving_or_paused(self, server):
        engine, model = tx.make_engine("embedded", url=server.url), tiny_model(7)
        with sending(engine, transport="ipc") as sender:
            report = sender.update_weights(model)
            (row,) = report.engines
            assert row.kind == "embedded" and 0 <= row.mean_gap <= row.max_gap < 1e-5 and row.proof == "outputs"
            assert report.verified and 0 < report.spans["probe"] <= report.spans["total"]
            prompts = random_prompts(VOCAB, seed=3)
            serving = engine.logprobs(prompts)
            engine.pause()
            assert engine.logprobs(prompts) == serving
            engine.resume()
        assert gaps(hand_made(model, prompts), serving)[0] < 1e-4
