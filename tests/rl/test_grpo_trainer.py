"""TorchRL's own `GRPOTrainer` with a sender of ours: the engine follows after each batch, by whatever transport."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torchrl.trainers.trainers import UpdateWeights

import torchrl_ext as tx
from tests.engines.embedded import EmbeddedServer
from tests.rl.collecting import make_policy, same, train
from tests.rl.grpo import trained
from torchrl_ext.control.http import HTTPSession
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.data.weights.digests import digests_of
from torchrl_ext.sync.local.inprocess import InProcessEngine
from torchrl_ext.testing.tiny import make_tiny_lm

pytestmark = pytest.mark.filterwarnings("ignore:GRPOTrainer is an experimental")


def test_swapping_the_transport_changes_nothing_else(tmp_path):
    """Each rollout is of the newest weights, the engine ends with the trainer's bits, and rewards are the same."""
    checkpoint, runs = make_tiny_lm(tmp_path / "model"), []
    with EmbeddedServer(checkpoint, threads=1) as server:
        for name, settings in (("collective", {}), ("delta", {"root": tmp_path / "delta"})):
            model, rewards, report = trained(server.url, checkpoint, tx.make_transport(name, **settings))
            held = HTTPSession(server.url).get("/weights_digest")["digests"]
            own = {key: one.hex() for key, one in digests_of(as_source(model)).items()}
            assert held.items() >= own.items() and report.proof == "in place"
            runs.append((rewards, own))
    assert runs[0] == runs[1] and max(runs[0][0]) > 0


def test_a_sender_follows_every_so_many_optimizer_steps():
    """As `GRPOTrainer(async_collection=True, weight_update_frequency=2)` asks for."""
    model, served, trainer = make_policy(1), make_policy(), SimpleNamespace(_optim_count=0, optimization_stepper=None)
    with tx.WeightSender(tx.MemoryTransport(), InProcessEngine(served)) as sender:
        sender.register_model(model)
        hook = UpdateWeights(sender=sender, trainer=trainer, update_weights_interval=2, interval_unit="optim_steps")
        for step in range(1, 5):
            trainer._optim_count = step
            train(model, step)
            hook()
            assert sender.version == step // 2 and same(served.state_dict(), model.state_dict()) == (step % 2 == 0)
