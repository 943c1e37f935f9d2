"""Real engines compute the trainer's log-probabilities after an update, also of tokens that they would never pick.

Those that compute in bfloat16 take weights in bfloat16, and others with a cast.
"""

import math

import pytest
import torch

import torchrl_ext as tx
from tests.models import VOCAB, tiny_model
from tests.real_engines.served import sending
from torchrl_ext.base.errors import UpdateError
from torchrl_ext.sync.outputs import Probe, gaps, random_prompts, score

pytestmark = pytest.mark.engine

FAR = 1e-4
BY_OUTPUTS = {"verify": "outputs"}


def test_tokens_of_any_rank_count_and_no_cache_answers(served, tmp_path):
    """A prompt that was served with the old weights, long enough for their keys and values to be kept."""
    engine, (prompt,) = tx.make_engine(served.kind, url=served.url), random_prompts(VOCAB, sequences=1, tokens=200)
    served.generate(8, prompt=list(prompt))
    with sending("disk", tmp_path, served) as sender:
        for seed in (5, 6):
            model = tiny_model(seed)
            sender.update_weights(model)
            continued = [*prompt, *served.generate(8, prompt=list(prompt))["token_ids"]]
            for asked in ([prompt], [continued], [prompt, continued, prompt[:2]]):
                found = engine.logprobs(asked)
                assert gaps(score(model, asked), found)[0] <= FAR
            assert found[1][-1] > max(found[1][:100])  # the engine's own pick
    assert min(found[0]) < math.log(1 / VOCAB)
    engine.close()


def test_engine_with_other_outputs_is_paused_until_a_good_update(served, tmp_path):
    truth = tiny_model(8)
    probe = Probe(prompts=random_prompts(VOCAB), compute=lambda prompts: score(truth, prompts))
    with sending("disk", tmp_path, served, proving={**BY_OUTPUTS, "probe": probe}) as sender:
        with pytest.raises(UpdateError, match="computes other outputs"):
            sender.update_weights(tiny_model(7))
        assert served.paused()
        served.assert_serves(truth, sender.update_weights(truth))


def test_bfloat16_engine_takes_float32_weights_only_with_a_cast(bfloat16, tmp_path):
    model = tiny_model(11, decided=True)
    with sending("disk", tmp_path / "plain", bfloat16) as sender:
        with pytest.raises(tx.WeightSyncError, match=r"would round it.*dtype=torch\.bfloat16"):
            sender.update_weights(model)
        assert not bfloat16.paused()
    engine = tx.make_engine(bfloat16.kind, url=bfloat16.url)
    sender = tx.WeightSender(tx.make_transport("disk", root=tmp_path / "cast"), engine, dtype=torch.bfloat16)
    bfloat16.assert_serves(model.bfloat16(), sender.update_weights(model))
