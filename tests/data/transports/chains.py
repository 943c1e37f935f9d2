"""Small chains for the tests of the delta transport: weights, steps between versions, and what a root then holds."""

import json
from pathlib import Path

import torch
import zstandard
from safetensors.torch import save_file
from xxhash import xxh3_128_hexdigest

import torchrl_ext as tx
from torchrl_ext.data.stores.manifest import END
from torchrl_ext.testing import any_bits, same_bits


def weights(seed=0):
    return {
        "a.weight": any_bits(torch.bfloat16, 60, 70, seed=seed),
        "b.weight": any_bits(torch.float32, 300, seed=seed + 1),
        "c.count": torch.arange(20),
    }


def step(tensors, seed, share=0.03):
    """Change some elements of each tensor but the last one, in place."""
    generator = torch.Generator().manual_seed(seed)
    for name in ("a.weight", "b.weight"):
        flat = tensors[name].view(-1)
        where = torch.rand(flat.shape, generator=generator) < share
        flat[where] = torch.randn(flat.shape, generator=generator).to(flat.dtype)[where]


def same(received, expected):
    return set(received.keys()) == set(expected) and all(same_bits(received[k], v) for k, v in expected.items())


def trainer_at(root, **settings):
    return tx.make_transport("delta", root=root, **settings)


def published(root, count, **settings):
    """A root with ``count`` versions; returns the trainer, its weights, and what each version was."""
    trainer, own, history = trainer_at(root, **settings), weights(), {}
    for version in range(1, count + 1):
        trainer.send_weights("policy", own)
        history[version] = {name: tensor.clone() for name, tensor in own.items()}
        step(own, version)
    return trainer, own, history


class Spoiled(tx.DeltaTransport):
    """A trainer some of whose versions are damaged as soon as they are published: ``spoils[version](folder)``."""

    def __init__(self, root, **settings):
        super().__init__(root, **settings)
        self.spoils = {}

    def prepare(self, update, within):
        made = super().prepare(update, within)
        self.spoils.get(update.version, lambda place: None)(folder(Path(self.root), update.version))
        return made


def folder(root, version):
    return root / f"weight_v{version:06d}"


def checkpoint(path, tensors):
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def rewrite(path, change):
    """Change a manifest; what is written is plain JSON, with the checksum of its text."""
    document = json.loads(zstandard.decompress(path.read_bytes()))
    del document["content"]
    change(document)
    body = json.dumps(document)[:-1].encode()
    path.write_bytes(body + END % xxh3_128_hexdigest(body).encode())
