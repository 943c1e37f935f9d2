"""Every name of an update lands when it comes as changes, or the update is refused: none is dropped."""

import pytest
import torch
from torch import nn

import torchrl_ext as tx
from tests.landing.changes import Listed
from torchrl_ext.errors import IntegrityError, ManifestError, UpdateError
from torchrl_ext.landing.loader import TensorsLoader
from torchrl_ext.landing.patcher import READ_BACK_VERSIONS
from torchrl_ext.sync.engines.inprocess import InProcessEngine


class Policy(nn.Module):
    """A tied pair of weights, and a buffer that is not persistent."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(3), persistent=False)


def following(policy, root):
    return tx.WeightSender(tx.make_transport("delta", root=root), InProcessEngine(policy))


def test_a_buffer_that_is_not_persistent_lands_when_it_changes(tmp_path):
    own, theirs = Policy(0), Policy(1)
    sender = following(theirs, tmp_path)
    for step in range(3):
        own.scale[step] = 7.0 + step
        weights = {"embed.weight": own.embed.weight.detach(), "scale": own.scale}
        assert sender.update_weights(weights).proof == "in place" and torch.equal(theirs.scale, own.scale)


def test_a_tied_tensor_lands_under_either_of_its_names(tmp_path):
    own, theirs = Policy(0), Policy(1)
    for name in ("embed.weight", "head.weight"):
        sender = following(theirs, tmp_path / name)
        for step in range(3):
            with torch.no_grad():
                own.embed.weight[step] += 1.0
            assert sender.update_weights({name: own.embed.weight.detach()}).verified
            assert torch.equal(theirs.head.weight, own.embed.weight)


def test_a_change_of_a_name_that_was_not_checked_is_refused():
    loader = TensorsLoader(Policy(0))
    changes = Listed(digests=dict.fromkeys(("embed.weight", "stranger"), "0" * 32))
    with pytest.raises(ManifestError, match="stranger"):
        loader.stage(changes)


def test_a_damaged_element_is_found_within_the_stated_number_of_versions(tmp_path):
    own, theirs = (
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))),
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))),
    )
    sender = following(theirs, tmp_path)
    for _ in range(2):
        assert sender.update_weights(own).verified
    with torch.no_grad():
        theirs[13].weight[2, 1] += 1.0
    with pytest.raises(UpdateError, match="weight") as told:
        for _ in range(READ_BACK_VERSIONS):
            with torch.no_grad():
                own[0].bias += 0.5
            sender.update_weights(own)
    assert isinstance(told.value.__cause__, IntegrityError) and told.value.report.engines[0].state == "paused"
    assert sender.update_weights(own).verified  # whole, and mended
    assert all(torch.equal(one, other) for one, other in zip(own.parameters(), theirs.parameters(), strict=True))
