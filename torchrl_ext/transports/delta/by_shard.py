"""The trainer's ranks behind a delta transport with ``by_shard``: what each of them does in an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch

from torchrl_ext.codecs.auto import AutoCodec
from torchrl_ext.codecs.base import Codec
from torchrl_ext.errors import ConfigError
from torchrl_ext.stores import Store
from torchrl_ext.transports.ranks import Session, Steps
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
        store: where versions are written.
        base: the checkpoint directory on which the first version is a delta.
        device: where copies are; as `OwnBlocks`.
        ranks: returns the session in which rank 0 leads the others.

    Attributes:
        own: what this rank keeps.
    """

    def __init__(
        self, store: Store, base: str | None, device: torch.device | None, ranks: Callable[[], Session]
    ) -> None:
        self._store, self._base, self._ranks = store, base, ranks
        self.own = OwnBlocks(device)
        self._copies: RankCopies | None = None

    def baseline(self) -> RankCopies:
        """Return what deltas are taken against, as rank 0 sees it."""
        self._copies = RankCopies(self._ranks, self.own)
        return self._copies

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """The bytes that each rank wrote of the last delta, in order of rank; known on rank 0."""
        return () if self._copies is None else self._copies.rank_bytes

    def steps(self, source: WeightSource, rank: int) -> Steps:
        """Return what another rank does when rank 0 orders it."""
        return steps(self.own, source, self._store, rank, self._base)


def of_blocks(codec: Codec) -> Codec:
    """Return the codec for parts of tensors, which must all be steps where readers do not hold the base."""
    if isinstance(codec, AutoCodec) and not codec.whole_base:
        return AutoCodec(link_bytes_s=codec.link_bytes_s, threads=codec.threads, whole_base=False, dense=False)
    return codec
