"""``python -m tests.bench tiles``: what tiles cost a trainer, and which share of a delta a worker of eight reads."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torchrl_ext.bench.data import PAIRS, synthetic_pair
from torchrl_ext.bench.runner import rounds
from torchrl_ext.stores import LocalStore
from torchrl_ext.stores.chain import Chain
from torchrl_ext.transports.delta.transport import DeltaTransport
from torchrl_ext.versions.checkpoint_reader import PublishedVersion
from torchrl_ext.versions.reader import ChainReader
from torchrl_ext.weights.shards.blocks import Block

_WORKERS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the settings."""
    parser.add_argument("--size", choices=PAIRS, default="full", help="full: 418 M parameters")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--encoding", default="ulp")
    parser.add_argument("--dir", default=None, help="where versions are published")


def measure(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Publish a model to and fro, with and without tiles in turns, and take processor time."""
    pair = synthetic_pair(args.density, **PAIRS[args.size])
    sides = [{name: tensors[side] for name, *tensors in pair} for side in (0, 1)]
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-", dir=args.dir) as root:
        trainers = {tiles: _trainer(f"{root}/{tiles}", tiles, args.encoding) for tiles in (1, _WORKERS)}
        sent = dict.fromkeys(trainers, 0)

        def publish(tiles: int) -> float:
            began = time.process_time()
            trainers[tiles].send_weights("policy", sides[sent[tiles] % 2])
            sent[tiles] += 1
            return time.process_time() - began

        for tiles in trainers:
            say(f"keyframe, {tiles} x {tiles} tiles")
            publish(tiles)
        seconds = rounds({str(tiles): partial(publish, tiles) for tiles in trainers}, args.repeats)
        shares = {}
        for tiles in trainers:
            for dim, by in enumerate(("rows", "columns")):
                say(f"{tiles} x {tiles} tiles, by {by}")
                shares[f"{tiles} {by}"] = _share(f"{root}/{tiles}", dim)
    least = {tiles: min(taken) for tiles, taken in seconds.items()}
    return {"seconds": seconds, "ratio": least[str(_WORKERS)] / least["1"], "shares": shares}


def _trainer(root: str, tiles: int, encoding: str) -> DeltaTransport:
    return DeltaTransport(root, encoding=encoding, keyframe_every=0, tiles=tiles)


def _share(root: str, dim: int) -> float:
    """Return which share of the delta after a keyframe one worker reads that has an eighth of each matrix."""
    store = LocalStore(root)
    reader = ChainReader(Chain(store), lambda *full: PublishedVersion(store, *full))
    wanted = {}
    for name, tensor in reader.tensors(reader.open(1), {}):
        whole = Block.whole(tensor.shape)
        stop = tuple(
            size // _WORKERS if own == dim and tensor.dim() > 1 else size for own, size in enumerate(whole.stop)
        )
        wanted[name] = (Block(whole.start, stop),)
    reader.want(wanted)
    reader.changes(2)
    delta = Chain(store).version(2).delta
    return reader.read_bytes / sum(delta.files.values())
