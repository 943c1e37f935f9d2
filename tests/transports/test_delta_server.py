"""A delta transport and an engine in a process of its own: damage is refused, and the next version lands."""

from __future__ import annotations

import httpx
import pytest
import torch

import torchrl_ext as tx
from tests.embedded import EmbeddedServer
from tests.models import PROMPT, greedy, tiny_checkpoint, tiny_model
from tests.transports.chains import Spoiled, flip
from torchrl_ext.errors import UpdateError
from torchrl_ext.rollout.client import InferenceClient


@pytest.fixture(scope="module")
def server(s3, tmp_path_factory):
    """An engine whose environment has the credentials of the object store."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", s3["endpoint_url"])
        patch.setenv("AWS_ACCESS_KEY_ID", s3["key"])
        patch.setenv("AWS_SECRET_ACCESS_KEY", s3["secret"])
        with EmbeddedServer(tiny_checkpoint(tmp_path_factory.mktemp("model")), dtype="float32", threads=1) as running:
            yield running


def test_a_damaged_delta_is_refused_and_the_old_version_serves_until_the_next_one_lands(server, tmp_path):
    def served():
        (found,) = client.generate([PROMPT], max_tokens=12, temperature=0.0, ignore_eos=True)
        return list(found.token_ids)

    client, policy = InferenceClient(server.url, timeout_s=120), tiny_model(seed=1)
    trainer = Spoiled(tmp_path, keyframe_every=0)
    sender = tx.WeightSender(trainer, tx.make_engine("embedded", url=server.url))

    def train():
        with torch.no_grad():
            policy.lm_head.weight.copy_(policy.lm_head.weight[torch.randperm(policy.lm_head.weight.shape[0])])

    for _ in range(2):
        report = sender.update_weights(policy)
        assert report.verified and served() == greedy(policy, PROMPT, 12)
        train()
    assert 0 < report.bytes < report.model_bytes
    before, version = served(), sender.version
    trainer.spoils[version + 1] = lambda place: flip(place / "delta-00001.bin", 200)
    with pytest.raises(UpdateError, match=r"tensor '.*' in .*/delta-00001.bin is damaged") as refused:
        sender.update_weights(policy)
    assert refused.value.rows[0].state == "serving"
    assert served() == before
    assert httpx.get(f"{server.url}/weight_info").json()["weight_version"] == str(version)
    assert sender.update_weights(policy).verified
    assert served() == greedy(policy, PROMPT, 12)
    train()
    last = sender.update_weights(policy)
    assert last.verified and last.bytes < last.model_bytes and served() == greedy(policy, PROMPT, 12)
    sender.shutdown()


def test_an_engine_in_another_process_follows_a_bucket(server, s3):
    """Credentials are each side's own: the trainer's are settings here, the engine's come from its environment."""
    policy, client = tiny_model(seed=1), InferenceClient(server.url, timeout_s=120)
    transport = tx.make_transport("delta", root="s3://bucket/engine", storage_options=s3)
    sender = tx.WeightSender(transport, tx.make_engine("embedded", url=server.url))
    for step in range(3):
        report = sender.update_weights(policy)
        assert report.verified and report.engines[0].state == "serving"
        (found,) = client.generate([PROMPT], max_tokens=12, temperature=0.0, ignore_eos=True)
        assert list(found.token_ids) == greedy(policy, PROMPT, 12)
        with torch.no_grad():
            policy.lm_head.weight[step * 7].neg_()
    sender.shutdown()
