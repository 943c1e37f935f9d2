"""What tests of updates share: transports by name, and models that change and are compared."""

from __future__ import annotations

import torch

import torchrl_ext as tx
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.data.weights.digests import position_digest
from torchrl_ext.testing import same_bits

STEPS = ("stage", "begin", "load", "verify", "commit")


def made(name, root, **settings):
    """A transport; ``root`` is for one that has files."""
    return tx.make_transport(name, **({"root": root} if name in ("disk", "delta") else {}), **settings)


@torch.no_grad()
def change(policy):
    for parameter in policy.parameters():
        parameter.add_(1)


def before(engine, step, act):
    """Have ``act`` called once before a step of an engine's client, or of its next update; it may raise."""

    def wrapped(owner):
        real = getattr(owner, step)

        def first(*args, **more):
            setattr(owner, step, real)
            act()
            return real(*args, **more)

        setattr(owner, step, first)
        return owner

    if step not in STEPS:
        wrapped(engine)
        return
    update = engine.update

    def updating(version, *manner):
        engine.update = update
        return wrapped(update(version, *manner))

    engine.update = updating


def same(held, weights):
    """Whether two models, or mappings, hold the same tensors, bit for bit."""
    found, wanted = dict(as_source(held)), dict(as_source(weights))
    return found.keys() == wanted.keys() and all(same_bits(found[name], wanted[name]) for name in wanted)


def digests(held):
    """The digest of each tensor of a model, or of a mapping, as engines name them."""
    return {name: position_digest(tensor).hex() for name, tensor in as_source(held)}
