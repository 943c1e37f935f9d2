"""The trainer's ranks behind a delta transport with ``by_shard``: what each of them does in an update."""

from __future__ import annotations

import os
from typing import final

import torch

from torchrl_ext.codecs.auto import AutoCodec
from torchrl_ext.codecs.base import Codec
from torchrl_ext.errors import ConfigError
from torchrl_ext.stores import Store
from torchrl_ext.transports.ranks import TrainerRanks
from torchrl_ext.versions.shards.copies import RankCopies, steps
from torchrl_ext.versions.shards.own import OwnBlocks
from torchrl_ext.weights.source import WeightSource

__all__ = ["ENCODINGS", "ByShard", "of_blocks", "refuse"]

ENCODINGS = ("ulp", "context", "dense", "auto")
"""The encodings whose payloads can be those of blocks; the others are files of another library."""


def refuse(carrier: str, encoding: str) -> None:
    """Raise a ConfigError where versions cannot be written by shard."""
    if carrier != "disk":
        raise ConfigError(
            f"by_shard with carrier {carrier!r}",
            expected="carrier 'disk': every trainer rank writes files, and workers read some of them",
            hint="take carrier='disk', or transport 'sharded'",
        )
    if encoding not in ENCODINGS:
        raise ConfigError(
            f"by_shard with encoding {encoding!r}, whose files hold whole tensors",
            expected=f"one of {', '.join(map(repr, ENCODINGS))}",
        )


@final
class ByShard:
    """One rank of a trainer whose ranks write versions together.

    Args:
        name: of the transport.
        store: where versions are written.
        base: the checkpoint directory on which the first version is a delta.
        device: where copies are; as `OwnBlocks`.
        timeout_s: how long a rank may take for an answer, in seconds.

    Attributes:
        ranks: the trainer's ranks.
        own: what this rank keeps.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        base: str | os.PathLike[str] | None,
        device: torch.device | None,
        timeout_s: float,
    ) -> None:
        self.ranks = TrainerRanks(f"{name}/by_shard", timeout_s)
        self.own = OwnBlocks(device)
        self._copies: RankCopies | None = None
        self._store, self._base = store, None if base is None else os.fspath(base)

    def baseline(self) -> RankCopies:
        """Return what deltas are taken against, as rank 0 sees it."""
        self._copies = RankCopies(self.ranks, self.own)
        return self._copies

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """The bytes that each rank wrote of the last delta, in order of rank; known on rank 0."""
        return () if self._copies is None else self._copies.rank_bytes

    def follow(self, source: WeightSource) -> None:
        """Do what rank 0 says, until it says that the update is over."""
        self.ranks.serve(steps(self.own, source, self._store, self.ranks.rank, self._base))

    def dismiss(self, error: BaseException | None) -> None:
        """As `TrainerRanks.dismiss`."""
        self.ranks.dismiss(error)


def of_blocks(codec: Codec) -> Codec:
    """Return the codec for parts of tensors, which must all be steps where readers do not hold the base."""
    if isinstance(codec, AutoCodec) and not codec.whole_base:
        return AutoCodec(link_bytes_s=codec.link_bytes_s, threads=codec.threads, whole_base=False, dense=False)
    return codec
