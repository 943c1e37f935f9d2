"""Engines that are killed in the middle of an update: the others go on, and the lost one catches up when it is back."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import torchrl_ext as tx
from tests.engines.embedded import EmbeddedServer
from tests.models import PROMPT, greedy, tiny_checkpoint, tiny_model
from torchrl_ext.base.errors import EngineError, UpdateError
from torchrl_ext.control.fleet import Fleet
from torchrl_ext.control.requests.client import InferenceClient
from torchrl_ext.control.serving.processes import free_port


def doomed(server, step):
    """A client of an engine whose process is killed as soon as it is asked to do ``step``."""
    engine = tx.make_engine("embedded", url=server.url)
    real = getattr(engine, step)

    def killed(*arguments, **more):
        os.kill(server.pid, signal.SIGKILL)
        setattr(engine, step, real)
        return real(*arguments, **more)

    setattr(engine, step, killed)
    return engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def steady(checkpoint):
    with EmbeddedServer(checkpoint, dtype="float32", threads=1) as server:
        yield server


def step(policy, seed):
    with torch.no_grad():
        policy.lm_head.weight[seed * 5 % 512].neg_()
        policy.model.embed_tokens.weight[seed * 3 % 512].neg_()


def says(server):
    (found,) = InferenceClient(server.url, timeout_s=120).generate(
        [PROMPT], max_tokens=8, temperature=0, ignore_eos=True
    )
    return list(found.token_ids)


def serve(checkpoint, port):
    return EmbeddedServer(checkpoint, port=port, dtype="float32", threads=1)


@pytest.mark.parametrize(
    ("name", "point"),
    [
        *(("delta", point) for point in ("info", "connect", "rehearse", "prefetch", "begin", "load", "commit")),
        *(("collective", point) for point in ("connect", "rehearse", "prefetch", "load")),
    ],
)
def test_killed_engine_is_reported_and_catches_up_on_restart(name, point, steady, checkpoint, tmp_path):
    """The report names the killed engine, the other serves the update, and the restarted one catches up."""
    policy, port = tiny_model(seed=1), free_port()
    transport = tx.make_transport(name, timeout_s=20, **({"root": tmp_path / "root"} if name == "delta" else {}))
    with serve(checkpoint, port) as server:
        fleet = Fleet([tx.make_engine("embedded", url=steady.url), doomed(server, point)])
        sender = tx.WeightSender(transport, fleet)
        with pytest.raises(UpdateError) as told:
            sender.update_weights(policy)
        rows = told.value.rows
        assert rows[1].error and rows[1].engine == server.url
        assert rows[0].state == "serving" and rows[0].version == told.value.report.version
        assert says(steady) == greedy(policy, PROMPT, 8)
        step(policy, 1)
        report = sender.update_weights(policy)  # nobody is told twice
        assert [row.state for row in report.engines] == ["serving", "unreachable"]
        assert says(steady) == greedy(policy, PROMPT, 8)
    with serve(checkpoint, port) as server:
        step(policy, 2)
        report = sender.update_weights(policy)
        assert [row.state for row in report.engines] == ["serving", "serving"] and report.verified
        assert says(server) == says(steady) == greedy(policy, PROMPT, 8)
        step(policy, 3)
        assert [row.version for row in sender.update_weights(policy).engines] == [sender.version] * 2
        assert says(server) == says(steady) == greedy(policy, PROMPT, 8)
        sender.shutdown()


@pytest.mark.parametrize("name", ["delta", "collective"])
def test_engine_killed_while_joining_does_not_block_the_others(name, steady, checkpoint, tmp_path):
    """An engine that is killed while it joins a fleet is reported, and the other engine gets the version."""
    policy = tiny_model(seed=1)
    transport = tx.make_transport(name, timeout_s=20, **({"root": tmp_path / "root"} if name == "delta" else {}))
    fleet = Fleet([tx.make_engine("embedded", url=steady.url)])
    with serve(checkpoint, free_port()) as server, tx.WeightSender(transport, fleet) as sender:
        sender.update_weights(policy)
        step(policy, 4)
        fleet.add(doomed(server, "connect"))
        with pytest.raises(UpdateError, match=server.url) as told:
            sender.update_weights(policy)
        assert [row.state for row in told.value.rows] == ["serving", "unreachable"]
        assert told.value.rows[0].version == told.value.report.version
        assert says(steady) == greedy(policy, PROMPT, 8)


def test_without_any_engine_that_answers_nothing_begins(checkpoint, tmp_path):
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    fleet = Fleet([tx.make_engine("embedded", url=url) for url in urls])
    sender = tx.WeightSender(tx.DiskTransport(tmp_path), fleet)
    for _ in range(2):
        with pytest.raises(EngineError, match="no engine of the fleet answered") as told:
            sender.update_weights({"x": torch.ones(3)})
        assert all(url in str(told.value) for url in urls)
    assert not list(tmp_path.glob("weight_v*"))
