"""``python -m tests.bench tiles``: what tiles cost a trainer, and which share of a delta a worker of eight reads."""

from __future__ import annotations

import tempfile
import time
from functools import partial
from typing import Any, Literal

from tests.bench.frame import say
from torchrl_ext.bench.data import SIZES, synthetic_pair
from torchrl_ext.bench.runner import rounds
from torchrl_ext.stores import LocalStore
from torchrl_ext.stores.chain import Chain
from torchrl_ext.transports.delta.transport import DeltaTransport
from torchrl_ext.versions.checkpoint_reader import PublishedVersion
from torchrl_ext.versions.reader import ChainReader
from torchrl_ext.weights.shards.blocks import Block

_WORKERS = 8


def measure(
    *,
    repeats: int = 7,
    size: Literal["full", "small", "tiny"] = "full",
    density: float = 0.01,
    encoding: str = "ulp",
    dir: str | None = None,
) -> dict[str, Any]:
    """Publish a model of --size to and fro into --dir, with and without tiles in turns, and take processor time."""
    pair = synthetic_pair(SIZES[size]["model"], density)
    sides = [{name: tensors[side] for name, *tensors in pair} for side in (0, 1)]
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-", dir=dir) as root:
        trainers = {tiles: _trainer(f"{root}/{tiles}", tiles, encoding) for tiles in (1, _WORKERS)}
        sent = dict.fromkeys(trainers, 0)

        def publish(tiles: int) -> float:
            began = time.process_time()
            trainers[tiles].send_weights("policy", sides[sent[tiles] % 2])
            sent[tiles] += 1
            return time.process_time() - began

        for tiles in trainers:
            say(f"keyframe, {tiles} x {tiles} tiles")
            publish(tiles)
        seconds = rounds({str(tiles): partial(publish, tiles) for tiles in trainers}, repeats)
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
