"""Engines that are killed in the middle of an update: the others go on, and the lost one catches up when it is back."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import torchrl_ext as tx
from tests.engines.embedded import EmbeddedServer
from tests.models import PROMPT, greedy, tiny_model
from tests.sync.ends import before, made
from torchrl_ext.base.errors import EngineError, UpdateError
from torchrl_ext.control.fleet import Fleet
from torchrl_ext.control.requests.client import InferenceClient
from torchrl_ext.control.serving.processes import free_port


def doomed(server, step):
    """A client of an engine whose process is killed as soon as it is asked to do ``step``."""
    engine = tx.make_engine("embedded", url=server.url)
    before(engine, step, lambda: os.kill(server.pid, signal.SIGKILL))
    return engine


@torch.no_grad()
def step(policy, seed):
    policy.lm_head.weight[seed * 5 % 512].neg_()
    policy.model.embed_tokens.weight[seed * 3 % 512].neg_()


def follows(policy, *servers):
    clients = [InferenceClient(server.url, timeout_s=120) for server in servers]
    settings = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    said = [list(client.generate([PROMPT], **settings)[0].token_ids) for client in clients]
    return said == [greedy(policy, PROMPT, 8)] * len(servers)


@pytest.mark.parametrize(
    ("name", "point"),
    [
        *(("delta", point) for point in ("info", "join", "rehearse", "stage", "begin", "load", "commit")),
        *(("collective", point) for point in ("join", "load")),
    ],
)
def test_killed_engine_is_reported_and_catches_up_on_restart(name, point, server, checkpoint, tmp_path):
    policy, port = tiny_model(seed=1), free_port()
    with EmbeddedServer(checkpoint, port=port, dtype="float32") as lost:
        fleet = Fleet([tx.make_engine("embedded", url=server.url), doomed(lost, point)])
        sender = tx.WeightSender(made(name, tmp_path / "root", timeout_s=20), fleet)
        with pytest.raises(UpdateError) as told:
            sender.update_weights(policy)
        rows = told.value.rows
        assert rows[1].error and rows[1].engine == lost.url
        assert rows[0].state == "serving" and rows[0].version == told.value.report.version
        assert follows(policy, server)
        step(policy, 1)
        report = sender.update_weights(policy)  # nobody is told twice
        assert [row.state for row in report.engines] == ["serving", "unreachable"] and follows(policy, server)
    with EmbeddedServer(checkpoint, port=port, dtype="float32") as back, sender:
        for seed in (2, 3):
            step(policy, seed)
            report = sender.update_weights(policy)
            assert [(row.state, row.version) for row in report.engines] == [("serving", sender.version)] * 2
            assert report.verified and follows(policy, server, back)


@pytest.mark.parametrize("name", ["delta", "collective"])
def test_engine_killed_while_joining_does_not_block_the_others(name, server, checkpoint, tmp_path):
    policy, listed = tiny_model(seed=1), [tx.make_engine("embedded", url=server.url)]
    fleet = Fleet(listed, members=lambda: listed)
    sender = tx.WeightSender(made(name, tmp_path / "root", timeout_s=20), fleet)
    with EmbeddedServer(checkpoint, dtype="float32") as lost, sender:
        sender.update_weights(policy)
        step(policy, 4)
        listed.append(doomed(lost, "join"))
        with pytest.raises(UpdateError, match=lost.url) as told:
            sender.update_weights(policy)
        assert [row.state for row in told.value.rows] == ["serving", "unreachable"]
        assert told.value.rows[0].version == told.value.report.version and follows(policy, server)


def test_without_any_engine_that_answers_nothing_begins(tmp_path):
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    sender = tx.WeightSender(tx.DiskTransport(tmp_path), Fleet([tx.make_engine("embedded", url=url) for url in urls]))
    for _ in range(2):
        with pytest.raises(EngineError, match="no engine of the fleet answered") as told:
            sender.update_weights({"x": torch.ones(3)})
        assert all(url in str(told.value) for url in urls)
    assert not list(tmp_path.glob("weight_v*"))
