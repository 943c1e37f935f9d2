"""Updates that leave a real engine's prefix cache: new requests reuse no keys and values of older weights."""

import pytest
import torch

import torchrl_ext as tx
from tests.models import tiny_model
from tests.real_engines.served import LONG, sending
from torchrl_ext.sync.outputs import score

pytestmark = pytest.mark.engine

NATS = 2e-3


def gap(client, model, **key):
    """The largest difference of a new token's log-probability to the one that ``model`` gives it, in nats."""
    (found,) = client.generate([LONG], max_tokens=4, temperature=0, ignore_eos=True, **key)
    expected = torch.tensor(score(model, [[*LONG, *found.token_ids]])[0][-4:])
    return (torch.tensor(found.logprobs) - expected).abs().max().item()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_repeated_prompt_without_flush_uses_no_old_cache(kind, request, tmp_path):
    served, old, new = request.getfixturevalue(kind), tiny_model(2), tiny_model(3)
    client = tx.InferenceClient(served.url, kind=kind)
    with sending("disk", tmp_path / "start", served) as sender:  # this one flushes
        before = sender.update_weights(old).version
    with sending("disk", tmp_path / "kept", served, keep_cache=True) as sender:
        for key in ({}, {"cache_versions": [before]}):
            assert gap(client, old, **key) < NATS
        version = sender.update_weights(new).version
        assert gap(client, new, cache_versions=[version]) < NATS
        assert gap(client, new) > 10 * NATS, "old keys and values answer who names no version"
        assert gap(client, new, cache_versions=[before]) > 10 * NATS, "a conversation goes on with those of its own"
        assert gap(client, new, cache_versions=[version]) < NATS
