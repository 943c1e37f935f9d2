"""TorchRL's own `GRPOTrainer` with a sender of ours: the engine follows after each batch, by whatever transport."""

from __future__ import annotations

import pytest

import torchrl_ext as tx
from tests.engines.embedded import EmbeddedServer
from tests.rl.grpo import trained
from torchrl_ext.control.http import HTTPSession
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.data.weights.digests import digests_of
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
