"""A model whose names share memory, and a trainer in which they have come apart: it keeps what it had, and serves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchrl_ext as tx
from tests.models import tiny_model
from tests.sync.ends import made
from torchrl_ext.base.errors import ManifestError, UpdateError
from torchrl_ext.sync.local.inprocess import InProcessEngine


class Policy(nn.Module):
    """Two layers, of which one has the memory of the other where they are tied."""

    def __init__(self, *, tied):
        super().__init__()
        self.embed, self.head = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    @torch.no_grad()
    def agree(self):
        """Have the values that one memory could hold."""
        self.head.weight.copy_(self.embed.weight)


@pytest.mark.parametrize("transport", ["memory", "disk", "delta"])
def test_unequal_tied_weights_are_refused_and_equal_ones_land(transport, tmp_path):
    held, trainer = Policy(tied=True), Policy(tied=False)
    transport = made(transport, tmp_path / "root")
    with tx.WeightSender(transport, InProcessEngine(held)) as sender:

        def refuses(changed, **part):
            before = {name: tensor.clone() for name, tensor in held.state_dict().items()}
            with torch.no_grad():
                changed.add_(1)
            with pytest.raises(UpdateError, match=r"one memory for .*tie_word_embeddings"):
                sender.update_weights(trainer, **part)
            assert all(torch.equal(tensor, before[name]) for name, tensor in held.state_dict().items())
            assert sender.engine.serving.is_set()
            trainer.agree()

        def lands(**part):
            assert sender.update_weights(trainer, **part).verified
            found = held.state_dict()
            assert all(torch.equal(tensor, found[name]) for name, tensor in trainer.state_dict().items())

        for changed in (trainer.head.weight, trainer.embed.weight):  # at first, and later
            refuses(changed)
            lands()
        if transport.abilities.parts:  # the other name is compared with a part that has one of them
            refuses(trainer.head.weight, only="head.weight")
            lands(only=["head.weight", "embed.weight"])


def test_readers_without_an_engine_get_no_version_of_them(tmp_path):
    with tx.DiskTransport(tmp_path) as writing, tx.DiskTransport(tmp_path) as reading:
        writing.send_weights(Policy(tied=False))
        with pytest.raises(ManifestError, match="one memory"):
            reading.receive_weights(timeout=30, model=Policy(tied=True))


def test_tied_checkpoint_is_published_only_with_equal_weights(tmp_path):
    trainer = tiny_model(0, tie_word_embeddings=True)
    trainer.lm_head.weight = nn.Parameter(trainer.lm_head.weight.detach() + 1)
    with tx.WeightSender(tx.DiskTransport(tmp_path)) as sender:
        with pytest.raises(UpdateError, match="one memory"):
            sender.update_weights(trainer)
        assert not list(tmp_path.glob("weight_v*"))
        trainer.lm_head.weight = nn.Parameter(trainer.model.embed_tokens.weight.detach().clone())
        assert sender.update_weights(trainer).version == 1
        assert list(tmp_path.glob("weight_v*"))
