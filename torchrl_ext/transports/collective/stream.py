"""The two ends of a stream of broadcasts, with several in flight so that packing, sending and unpacking overlap."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from torchrl_ext.transports.collective.buckets import (
    BufferPool,
    Piece,
    as_bytes,
    chunks,
    copy_each,
    landing,
    plain,
    views,
)
from torchrl_ext.transports.collective.group import Group
from torchrl_ext.types import ParamMeta

__all__ = ["Incoming", "Window", "send_pieces"]

_PACKED = 2
"""Buckets in flight: a send holds at most two buckets of memory of its own."""

_PIECES = 16
_BUCKETS = 8
"""Pieces in flight, and their bytes in buckets (or two tensors, if they are larger): what travels as it lies in memory
costs none, unless the source makes its tensors on the way (a gather, a cast)."""


class Window:
    """Broadcasts in flight, oldest first.

    Args:
        group: what they run on.
        bucket_bytes: size of a bucket; 0 lets nothing overlap.
    """

    def __init__(self, group: Group, bucket_bytes: int) -> None:
        self._group = group
        self._flying: deque[tuple[Piece, list[Any], Any]] = deque()
        self._limit, self._limit_bytes = (_PIECES, _BUCKETS * bucket_bytes) if bucket_bytes else (0, 0)
        self._bytes = self._packed = 0

    def __len__(self) -> int:
        return len(self._flying)

    @property
    def full(self) -> bool:
        """Whether the oldest must land before another piece may start."""
        flying = len(self._flying)
        return flying > self._limit or (flying > 2 and self._bytes > self._limit_bytes)

    @property
    def packed_full(self) -> bool:
        """Whether the oldest must land before another bucket may be filled."""
        return self._packed >= _PACKED

    def start(self, piece: Piece, flat: Tensor | None, keep: Any) -> None:
        """Begin to broadcast the bytes of ``piece``; ``keep`` lives until they landed."""
        works = [] if flat is None else [self._group.broadcast(part) for part in chunks(flat)]
        self._flying.append((piece, works, keep))
        self._bytes += piece.nbytes
        self._packed += not piece.direct

    def land(self) -> tuple[Piece, Any]:
        """Wait for the oldest piece; the piece and what was kept for it.

        Raises:
            TransportError, DeadlineError: as `Group.wait`.
        """
        piece, works, keep = self._flying[0]
        for work in works:
            self._group.wait(work)
        self._flying.popleft()
        self._bytes -= piece.nbytes
        self._packed -= not piece.direct
        return piece, keep


def send_pieces(
    group: Group,
    pieces: Sequence[Piece],
    params: Sequence[ParamMeta],
    stream: Iterator[tuple[ParamMeta, Tensor]],
    *,
    bucket_bytes: int,
) -> None:
    """Trainer: broadcast what ``stream`` yields, which is ``params`` in order.

    Raises:
        TransportError, DeadlineError: as `Group.wait`.
        ManifestError: the stream is not what ``params`` says.
    """
    window, pool = Window(group, bucket_bytes), BufferPool(group.device)
    capacity = max((piece.nbytes for piece in pieces if not piece.direct), default=0)
    for piece in pieces:
        tensors = [tensor for _, tensor in islice(stream, piece.stop - piece.first)]
        flat = None
        if piece.direct:
            flat = as_bytes(plain(tensors[0], group.device))
        elif piece.nbytes:
            while window.packed_full:
                window.land()
            flat = pool.take(capacity)[: piece.nbytes]
            copy_each(tensors, views(piece, params, flat))
        del tensors
        window.start(piece, flat, flat)
        del flat
        while window.full:
            window.land()
    next(stream, None)  # lets a checked stream say that it has more than it declared
    while window:
        window.land()


class Incoming:
    """Worker: the pairs of one handoff, as they arrive.

    Args:
        group: what they arrive on.
        pieces: layout of ``params``.
        params: what arrives.
        into: tensors that may be filled directly.
        bucket_bytes: of the sender.
    """

    def __init__(
        self,
        group: Group,
        pieces: Sequence[Piece],
        params: Sequence[ParamMeta],
        into: Mapping[str, Tensor],
        *,
        bucket_bytes: int,
    ) -> None:
        self._group, self._params, self._into = group, params, into
        self._rest = deque(pieces)
        self._window = Window(group, bucket_bytes)
        self._pool = BufferPool(group.device)
        self._capacity = max((piece.nbytes for piece in pieces if not piece.direct), default=0)

    def pairs(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the pairs in order; whoever takes them may stop at any of them, and `drain` then takes the rest.

        Raises:
            TransportError, DeadlineError: as `Group.wait`.
        """
        while self._rest:
            while self._window.packed_full and not self._rest[0].direct:
                yield from self._land()
            self._begin_next(self._into)
            while self._window.full:
                yield from self._land()
        while self._window:
            yield from self._land()

    def drain(self) -> None:
        """Receive the rest and drop it, so that the group stays in step.

        Raises:
            TransportError, DeadlineError: as `Group.wait`.
        """
        while self._window:
            self._window.land()
        while self._rest:
            self._begin_next({})
            while self._window.full:
                self._window.land()
        while self._window:
            self._window.land()

    @property
    def complete(self) -> bool:
        """Whether every byte is here."""
        return not self._rest and not self._window

    def _begin_next(self, into: Mapping[str, Tensor]) -> None:
        """Let the next piece come. It leaves the list only when it is on its way, so that none is ever skipped."""
        piece = self._rest[0]
        self._window.start(piece, *self._place(piece, into))
        self._rest.popleft()

    def _place(self, piece: Piece, into: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor]:
        """Bytes to receive into, and the tensor or buffer that they belong to."""
        if not piece.direct:
            flat = self._pool.take(self._capacity)[: piece.nbytes]
            return (flat if piece.nbytes else None), flat
        meta = self._params[piece.first]
        target = landing(meta, into, self._group.device)
        if target is None:
            flat = self._pool.take(piece.nbytes)
            return flat, flat.view(meta.dtype).view(meta.shape)
        return as_bytes(target), target

    def _land(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._unpacked(*self._window.land())

    def _unpacked(self, piece: Piece, arrived: Tensor) -> Iterator[tuple[str, Tensor]]:
        metas = self._params[piece.first : piece.stop]
        tensors = [arrived] if piece.direct else views(piece, self._params, arrived)
        del arrived
        copied: list[tuple[Tensor, Tensor]] = []
        for index, (meta, tensor) in enumerate(zip(metas, tensors, strict=True)):
            target = self._into.get(meta.name)
            if target is None or target is tensor or not _alike(target, tensor):
                continue
            if target.data_ptr() != tensor.data_ptr():
                copied.append((tensor, target))
            tensors[index] = target
        if copied:
            copy_each([tensor for tensor, _ in copied], [target for _, target in copied])
            copied.clear()
        for meta, tensor in zip(metas, tensors, strict=True):
            yield meta.name, tensor


def _alike(target: Tensor, view: Tensor) -> bool:
    return target.dtype == view.dtype and target.shape == view.shape
