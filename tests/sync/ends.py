"""What tests of updates share: transports by name, and models that change and are compared."""

from __future__ import annotations

import torch

import torchrl_ext as tx
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.testing import same_bits


def made(name, root, **settings):
    """A transport; ``root`` is for one that has files."""
    return tx.make_transport(name, **({"root": root} if name in ("disk", "delta") else {}), **settings)


@torch.no_grad()
def change(policy):
    for parameter in policy.parameters():
        parameter.add_(1)


def same(held, weights):
    """Whether two models, or mappings, hold the same tensors, bit for bit."""
    found, wanted = dict(as_source(held)), dict(as_source(weights))
    return found.keys() == wanted.keys() and all(same_bits(found[name], wanted[name]) for name in wanted)
