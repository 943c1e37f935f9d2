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
    """An engine whose environment has the settings of the remote store."""
    with EmbeddedServer(tiny_checkpoint(tmp_path_factory.mktemp("model")), dtype="float32", threads=1) as running:
        yield running


def served(server):
    client = InferenceClient(server.url, timeout_s=120)
    (found,) = client.generate([PROMPT], max_tokens=12, temperature=0.0, ignore_eos=True)
    return list(found.token_ids)


def lands(server, sender, policy):
    """Send a version, see that the engine serves it, and train on."""
    report = sender.update_weights(policy)
    assert report.verified and report.engines[0].state == "serving"
    assert served(server) == greedy(policy, PROMPT, 12)
    with torch.no_grad():
        policy.lm_head.weight.copy_(policy.lm_head.weight[torch.randperm(policy.lm_head.weight.shape[0])])
    return report


def test_an_engine_in_another_process_follows_a_remote_root(server):
    policy, transport = tiny_model(seed=1), tx.make_transport("delta", root="s3://bucket/engine")
    sender = tx.WeightSender(transport, tx.make_engine("embedded", url=server.url))
    for _ in range(3):
        lands(server, sender, policy)
    sender.shutdown()


def test_a_damaged_delta_is_refused_and_the_old_version_serves_until_the_next_one_lands(server, tmp_path):
    policy, trainer = tiny_model(seed=1), Spoiled(tmp_path, keyframe_every=0)
    sender = tx.WeightSender(trainer, tx.make_engine("embedded", url=server.url))
    for _ in range(2):
        report = lands(server, sender, policy)
    assert 0 < report.bytes < report.model_bytes
    before, version = served(server), sender.version
    trainer.spoils[version + 1] = lambda place: flip(place / "delta-00001.bin", 200)
    with pytest.raises(UpdateError, match=r"tensor '.*' in .*/delta-00001.bin is damaged") as refused:
        sender.update_weights(policy)
    assert refused.value.rows[0].state == "serving" and served(server) == before
    assert httpx.get(f"{server.url}/weight_info").json()["weight_version"] == str(version)
    lands(server, sender, policy)
    last = lands(server, sender, policy)
    assert last.bytes < last.model_bytes
    sender.shutdown()
