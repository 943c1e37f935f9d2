"""A model whose names share memory, and a trainer in which they have come apart: it keeps what it had, and serves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchrl_ext as tx
from tests.models import tiny_model
from torchrl_ext.base.errors import ManifestError, UpdateError
from torchrl_ext.sync.local.inprocess import InProcessEngine

TRANSPORTS = ("memory", "disk", "delta")


class Policy(nn.Module):
    """Two layers, of which one has the memory of the other where they are tied."""

    def __init__(self, *, tied):
        super().__init__()
        self.embed, self.head = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight


class Flat(nn.Module):
    """Two weights with four elements in common, or none."""

    def __init__(self, *, tied):
        super().__init__()
        flat = torch.randn(20)
        second = flat[8:20] if tied else torch.randn(12)
        self.embed, self.head = nn.Module(), nn.Module()
        self.embed.weight, self.head.weight = nn.Parameter(flat[:12].view(3, 4)), nn.Parameter(second.view(4, 3))


def sender_of(transport, root, model):
    settings = {} if transport == "memory" else {"root": root}
    return tx.WeightSender(tx.make_transport(transport, **settings), InProcessEngine(model))


def held(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(model, other):
    assert all(torch.equal(tensor, other[name]) for name, tensor in model.state_dict().items())


def agree(kind, trainer):
    """Let the trainer's two tensors have the values that one memory could hold."""
    with torch.no_grad():
        if kind is Policy:
            trainer.head.weight.copy_(trainer.embed.weight)
        else:
            trainer.head.weight.view(-1)[:4] = trainer.embed.weight.view(-1)[8:]


@pytest.mark.parametrize("kind", [Policy, Flat])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_unequal_tied_weights_are_refused_and_equal_ones_land(kind, transport, tmp_path):
    """Two values for one memory change no weight of the engine, and equal values land."""
    engine, trainer = kind(tied=True), kind(tied=False)
    with sender_of(transport, tmp_path / "root", engine) as sender:
        for changed in (trainer.head.weight, trainer.head.weight, trainer.embed.weight):  # at first, and later
            before = held(engine)
            with torch.no_grad():
                changed.add_(1)
            with pytest.raises(UpdateError, match=r"one memory for .*tie_word_embeddings"):
                sender.update_weights(trainer)
            assert_same(engine, before)
            assert sender.engine.serving.is_set()
            agree(kind, trainer)
            assert sender.update_weights(trainer).verified
            assert_same(engine, trainer.state_dict())


@pytest.mark.parametrize("transport", [name for name in TRANSPORTS if name != "disk"])
def test_a_part_with_one_of_two_names_is_compared_with_the_other(transport, tmp_path):
    engine, trainer = Policy(tied=True), Policy(tied=False)
    agree(Policy, trainer)
    with sender_of(transport, tmp_path / "root", engine) as sender:
        sender.update_weights(trainer)
        before = held(engine)
        with torch.no_grad():
            trainer.head.weight.add_(1)
        with pytest.raises(UpdateError, match="one memory"):
            sender.update_weights(trainer, only="head.weight")
        assert_same(engine, before)
        agree(Policy, trainer)
        sender.update_weights(trainer, only=["head.weight", "embed.weight"])
        assert_same(engine, trainer.state_dict())


@pytest.mark.parametrize("transport", ["disk", "delta"])
def test_readers_without_an_engine_get_no_version_of_them(transport, tmp_path):
    trainer, reader = Policy(tied=False), Policy(tied=True)
    writing, reading = (tx.make_transport(transport, root=tmp_path) for _ in range(2))
    writing.send_weights(trainer)
    with pytest.raises(ManifestError, match="one memory"):
        reading.receive_weights(timeout=30, model=reader)


def test_tied_checkpoint_is_published_only_with_equal_weights(tmp_path):
    """A model whose config says that it is tied is published only if its tied weights are equal."""
    trainer = tiny_model(0, tie_word_embeddings=True)
    trainer.lm_head.weight = nn.Parameter(trainer.lm_head.weight.detach() + 1)
    with tx.WeightSender(tx.DiskTransport(tmp_path)) as sender:
        with pytest.raises(UpdateError, match="one memory"):
            sender.update_weights(trainer)
        assert not list(tmp_path.glob("weight_v*"))
        trainer.lm_head.weight = nn.Parameter(trainer.model.embed_tokens.weight.detach().clone())
        assert sender.update_weights(trainer).version == 1
        assert list(tmp_path.glob("weight_v*"))
