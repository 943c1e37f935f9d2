"""Senders and embedded engines on the lagging device, over HTTP by every transport."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import torchrl_ext as tx
from tests.engines.embedded import served_here
from tests.models import tiny_checkpoint, tiny_model
from torchrl_ext.engines.embedded.engine import EmbeddedEngine
from torchrl_ext.testing import WAIT_S, same_bits

ROADS = {
    "delta": {"root": True},
    "delta by broadcast": {"carrier": "collective"},
    "disk": {"root": True},
    "collective": {},
    "sharded": {},
    "ipc": {"bucket_bytes": 1 << 16},
    "ipc over the host": {"bucket_bytes": 1 << 16, "device": "cpu"},
}
VERSIONS = 3


def transport(road, folder):
    settings = dict(ROADS[road])
    if settings.pop("root", False):
        settings["root"] = folder / "root"
    return tx.make_transport(road.split()[0], timeout_s=WAIT_S, **settings)


@torch.no_grad()
def train(policy, seed):
    """Change a few elements, as a step of an optimizer does: queued on the current stream."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        turned = (torch.rand(parameter.shape, generator=generator) < 0.05).to(parameter.device)
        parameter.copy_(torch.where(turned, -parameter, parameter))


def different(policy, engine):
    """Names of parameters that the engine does not hold bit for bit."""
    torch.accelerator.synchronize("lag:0")
    torch.accelerator.synchronize("lag:1")
    held = dict(engine._model.named_parameters())
    return [name for name, one in policy.named_parameters() if not same_bits(one.detach().cpu(), held[name].cpu())]


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize(("side", "device"), [(False, "lag:0"), (True, "lag:0"), (True, "lag:1")])
def test_an_engine_on_a_device_computes_with_what_was_sent(lag, road, side, device, tmp_path):
    policy = tiny_model(1).to(lag)
    with (
        served_here(EmbeddedEngine(str(tiny_checkpoint(tmp_path / "model")), device=device)) as server,
        torch.Stream(lag) if side else nullcontext(),
        tx.WeightSender(transport(road, tmp_path), tx.connect(server.url)) as sender,
    ):
        sender.register_model(policy)
        for version in range(1, VERSIONS + 1):
            train(policy, version)
            report = sender.update_weights()
            assert (report.version, report.proof, different(policy, server.engine)) == (version, "in place", [])
