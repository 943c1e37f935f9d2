"""Real engines compute the trainer's log-probabilities after an update, also of tokens that they would never pick."""

import math
from contextlib import contextmanager

import pytest
import torch

import torchrl_ext as tx
from tests.engine.following import OfOneKind, sending
from tests.models import VOCAB, tiny_model
from torchrl_ext.errors import UpdateError
from torchrl_ext.proof.outputs import Probe, gaps, random_prompts
from torchrl_ext.proof.scoring import score

pytestmark = pytest.mark.engine

FAR = 1e-4


@contextmanager
def comparing(served, root, **settings):
    """A sender that compares outputs, to one server."""
    engine = tx.make_engine(served.kind, url=served.url)
    sender = tx.WeightSender(tx.make_transport("disk", root=root), engine, verify="outputs", **settings)
    try:
        yield sender
    finally:
        sender.shutdown()


class ComputesTheTrainersOutputs(OfOneKind):
    def test_gaps_after_each_update_are_rounding_errors(self, served, tmp_path):
        with comparing(served, tmp_path, max_gap=FAR) as sender:
            for seed in (1, 2, 3):
                model = tiny_model(seed)
                report = sender.update_weights(model)
                served.assert_serves(model, report)
                (row,) = report.engines
                assert 0 <= row.mean_gap <= row.max_gap <= FAR
                print(f"{self.kind}: max gap {row.max_gap:.2g}, mean {row.mean_gap:.2g}, {report.spans['probe']:.2f} s")

    def test_tokens_of_any_rank_count_and_no_cache_answers(self, served, tmp_path):
        """A prompt that was served with the old weights, long enough for their keys and values to be kept."""
        engine, (prompt,) = tx.make_engine(served.kind, url=served.url), random_prompts(VOCAB, sequences=1, tokens=200)
        greedy = served.generate(8, prompt=list(prompt))["token_ids"]
        with sending("disk", tmp_path, served) as sender:
            for seed in (5, 6):
                model = tiny_model(seed)
                sender.update_weights(model)
                continued = [*prompt, *served.generate(8, prompt=list(prompt))["token_ids"]]
                for asked in ([prompt], [continued], [prompt, continued, prompt[:2]]):
                    found = engine.logprobs(asked)
                    assert gaps(score(model, asked), found)[0] <= FAR
                assert found[1][-1] > max(found[1][:100])  # the engine's own pick
        assert min(found[0]) < math.log(1 / VOCAB) and len(greedy) == 8
        engine.close()

    def test_an_engine_that_is_told_another_truth_is_paused_until_a_good_update(self, served, tmp_path):
        def other(prompts):
            return score(tiny_model(8), prompts)

        probe = Probe(prompts=random_prompts(VOCAB), compute=other)
        with comparing(served, tmp_path, probe=probe) as sender:
            with pytest.raises(UpdateError, match="computes other outputs"):
                sender.update_weights(tiny_model(7))
            assert served.paused()
            model = tiny_model(8)
            served.assert_serves(model, sender.update_weights(model))


class ComputesThemInBfloat16(OfOneKind):
    def test_gaps_are_within_the_bound_of_the_dtype(self, bfloat16, tmp_path):
        with comparing(bfloat16, tmp_path) as sender:
            for seed in (1, 3):
                (row,) = sender.update_weights(tiny_model(seed, torch.bfloat16)).engines
                assert 0 < row.mean_gap < row.max_gap < 0.5
                print(f"{self.kind}: max gap {row.max_gap:.2g}, mean {row.mean_gap:.2g}")


class TestVLLM(ComputesTheTrainersOutputs):
    kind = "vllm"


class TestSGLang(ComputesTheTrainersOutputs):
    kind = "sglang"


@pytest.mark.exhaustive
class TestVLLMInBfloat16(ComputesThemInBfloat16):
    kind = "vllm"


@pytest.mark.exhaustive
class TestSGLangInBfloat16(ComputesThemInBfloat16):
    kind = "sglang"
