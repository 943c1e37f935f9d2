"""`auto` of blocks: the kind that lands soonest, by a sample of how a change codes, and speeds that are learned."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from functools import partial
from typing import ClassVar, Final, NamedTuple, final

import numpy as np
import torch

from torchrl_ext.codecs.blocks import BITMAP, CONTEXT, DENSE, ULP, BlockCodec
from torchrl_ext.codecs.streams import Found
from torchrl_ext.codecs.units import Unit
from torchrl_ext.errors import ConfigError
from torchrl_ext.stores.delta_manifest import BLOCKS
from torchrl_ext.types import Info

__all__ = ["AutoBlocks", "BlockEncoding", "Choice", "OneKind", "Speed"]

_SPANS, _SPAN = 8, 512  # the sample: runs of changes, or of units for `dense`
_MEASURED: Final = 1 << 17  # units that are coded once to see how fast a kind is
_TELLING: Final = 1 << 20  # bytes: what takes fewer tells of a link's latency, and not of its speed
_SHARE: Final = 0.3  # of what is observed in the average
_KINDS: Final = (ULP, BITMAP, DENSE)


@final
class Speed:
    """Bytes of payload a second, learned from what was observed; of a link, or of a kind of block."""

    def __init__(self) -> None:
        self._lock, self._seconds_per_byte = threading.Lock(), 0.0

    @property
    def bytes_s(self) -> float | None:
        """The speed; None before anything was observed."""
        return 1 / self._seconds_per_byte if self._seconds_per_byte else None

    def observe(self, nbytes: int, seconds: float) -> None:
        """Learn from ``nbytes`` that took ``seconds``; what took no time, or has no bytes, is ignored."""
        if nbytes <= 0 or not 0 < seconds < math.inf:
            return
        with self._lock:
            found = seconds / nbytes
            share = _SHARE if self._seconds_per_byte else 1.0
            self._seconds_per_byte += share * (found - self._seconds_per_byte)

    def seconds(self, nbytes: float) -> float:
        """Return what ``nbytes`` will take; 0 before anything was observed."""
        return nbytes * self._seconds_per_byte


class Choice(NamedTuple):
    """The kind that was picked for a block, and why, in a few words for reports."""

    codec: BlockCodec
    reason: str


class BlockEncoding(ABC):
    """How the blocks of a delta are coded.

    Attributes:
        name: of the encoding.
        whole_base: whether readers need the whole base.
        reasons: why each kind of block was picked last, by its name, in a few words for reports.
    """

    container: ClassVar[str] = BLOCKS

    def __init__(self, name: str, *, whole_base: bool = False) -> None:
        self.name, self.whole_base, self.reasons = name, whole_base, dict[str, str]()

    def to_json(self) -> Info:
        """Return ``{"name": ..., settings}``, from which `torchrl_ext.codecs.base.codec_from_json` makes it again."""
        return {"name": self.name}

    @abstractmethod
    def choose(self, unit: Unit, found: Found) -> Choice:
        """Return the kind for a block in which something changed; called from any thread."""

    def encode(self, unit: Unit, found: Found) -> tuple[str, bytes]:
        """Code a block in which something changed, and return the name of its kind; called from any thread."""
        codec, self.reasons[codec.name] = self.choose(unit, found)
        return codec.name, codec.encode(unit, found)

    def observe_link(self, nbytes: int, seconds: float) -> None:  # noqa: B027 - one kind has nothing to learn
        """Learn from the bytes of a version, and how long they were on their way to where engines take them."""


@final
class OneKind(BlockEncoding):
    """Codes every block with the same kind."""

    def __init__(self, kind: BlockCodec) -> None:
        super().__init__(kind.name, whole_base=kind.whole_base)
        self._kind, self.reasons[kind.name] = kind, f"{kind.name}: as asked"

    def choose(self, unit: Unit, found: Found) -> Choice:
        return Choice(self._kind, self.reasons[self.name])


@final
class AutoBlocks(BlockEncoding):
    """Picks `ulp`, `bitmap` or `dense` for each block.

    `context` is not among them: it takes half a dozen times as long to read, and readers that hold the whole base.

    Args:
        link_bytes_s: bytes a second between trainer and engines, where that is known; what is observed does not change
            it then. Until something was observed, the fewest bytes are the best.
        threads: cores that code, and that decode.

    Attributes:
        link: its speed.
        writes, reads: how fast one core writes and reads each kind: measured on the first large block, and then
            observed, as far as a kind is used.

    Raises:
        ConfigError: a speed or a number of threads that is not positive.
    """

    def __init__(self, *, link_bytes_s: float | None = None, threads: int = 2) -> None:
        super().__init__("auto")
        if not (link_bytes_s is None or _positive(link_bytes_s, (int, float))) or not _positive(threads, int):
            raise ConfigError(f"link_bytes_s={link_bytes_s!r}, threads={threads!r}", expected="positive")
        self.link, self._threads, self._given = Speed(), threads, link_bytes_s is not None
        if link_bytes_s is not None:
            self.link.observe(1 << 30, (1 << 30) / link_bytes_s)
        self.writes = {codec.name: Speed() for codec in _KINDS}
        self.reads = {codec.name: Speed() for codec in _KINDS}
        self._lock = threading.Lock()

    def to_json(self) -> Info:
        return {"name": self.name, "link_bytes_s": self.link.bytes_s, "threads": self._threads}

    def observe_link(self, nbytes: int, seconds: float) -> None:
        if not self._given and nbytes >= _TELLING:
            self.link.observe(nbytes, seconds)

    def encode(self, unit: Unit, found: Found) -> tuple[str, bytes]:
        codec, reason = self.choose(unit, found)
        began = time.perf_counter()
        payload = codec.encode(unit, found)
        if found.size >= _MEASURED:
            self.writes[codec.name].observe(len(payload), time.perf_counter() - began)
        self.reasons[codec.name] = reason
        return codec.name, payload

    def choose(self, unit: Unit, found: Found) -> Choice:
        """Return the kind for a block in which something changed; a change's density is exact, the rest is sampled."""
        if found.size >= _MEASURED:
            with self._lock:
                self._measure(unit, found)
        share, size, width = found.positions.size / found.size, found.size, unit.width
        sizes = {ULP: _sampled_ulp(unit, found), BITMAP: float(-(-size // 64) * 8 + found.positions.size * width)}
        if min(sizes.values()) > 0.25 * found.bits.nbytes:  # planes are at least about so large
            sizes[DENSE] = _sampled_dense(unit, found)
        costs = {codec: self._seconds(codec, nbytes) for codec, nbytes in sizes.items()}
        known = self.link.bytes_s
        best = min(costs, key=lambda codec: sum(costs[codec]) if known else sizes[codec])
        link = f"a link of {known / 1e6:.3g} MB/s" if known else "a link of unknown speed, so the fewest bytes"
        bits = ", ".join(f"{codec.name} {8 * sizes[codec] / size:.2g}" for codec in sizes)
        return Choice(best, f"{best.name}: {share:.2%} changed, {link}; bits per element: {bits}")

    def _seconds(self, codec: BlockCodec, nbytes: float) -> tuple[float, float]:
        """Return the seconds until a block has arrived, which is coded while another is sent, and to read it."""
        writing = self.writes[codec.name].seconds(nbytes) / self._threads
        return max(writing, self.link.seconds(nbytes)), self.reads[codec.name].seconds(nbytes) / self._threads

    def _measure(self, unit: Unit, found: Found) -> None:
        """Time the kinds that nothing is known of on a part of the block."""
        part = None
        for codec in _KINDS:
            write, read = self.writes[codec.name], self.reads[codec.name]
            if write.bytes_s and read.bytes_s:
                continue
            part = part or _part(found)
            for warm in (False, True):  # the first time, loops are compiled
                began = time.perf_counter()
                data = codec.encode(unit, part)
                written = time.perf_counter()
                codec.read(memoryview(data), unit, part.size, "a sample", None)
                if warm:
                    write.observe(len(data), written - began)
                    read.observe(len(data), time.perf_counter() - written)


def _part(found: Found) -> Found:
    """Return the part of a large block with the first change."""
    start = min(int(found.positions[0]), found.size - _MEASURED)
    end = start + _MEASURED
    own = slice(0, int(np.searchsorted(found.positions, end)))
    changed = found.positions[own] - np.int32(start)
    return found._replace(
        positions=changed, before=found.before[own], after=found.after[own], bits=found.bits[start:end], news=()
    )


def _sampled_ulp(unit: Unit, found: Found) -> float:
    """Return about how many bytes `ulp` takes: what it takes for runs of changes, spread over the block."""
    count = found.positions.size
    if count <= _SPANS * _SPAN:
        return float(len(ULP.encode(unit, found)))
    starts = np.linspace(0, count - _SPAN, _SPANS).astype(np.int64)
    where = (starts[:, None] + np.arange(_SPAN)).reshape(-1)
    gaps = np.diff(found.positions, prepend=np.int32(-1))[where]
    sample = found._replace(
        positions=gaps.cumsum(dtype=np.int32) - np.int32(1), before=found.before[where], after=found.after[where]
    )
    return len(ULP.encode(unit, sample)) * count / where.size


def _sampled_dense(unit: Unit, found: Found) -> float:
    """Return about how many bytes `dense` takes, from runs of old units, whose bytes are like those of the new."""
    size, span = found.size, 8 * _SPAN
    bits = found.bits
    if size > _SPANS * span:
        starts = np.linspace(0, size - span, _SPANS).astype(np.int64).tolist()
        bits = torch.cat([bits[start : start + span] for start in starts])
    nothing = found._replace(positions=found.positions[:0], before=found.before[:0], after=found.after[:0], bits=bits)
    return len(DENSE.encode(unit, nothing)) * size / bits.numel()


def _positive(value: object, kind: type[float] | tuple[type[float], ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and 0 < value < math.inf


ulp, context, bitmap, dense = (partial(OneKind, kind) for kind in (ULP, CONTEXT, BITMAP, DENSE))
