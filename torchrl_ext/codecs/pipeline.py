"""The coding of many tensors by several threads: payloads come out in order while later tensors are scanned."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.codecs.base import Block, Codec, Encoded
from torchrl_ext.codecs.patch import check_same
from torchrl_ext.codecs.units import Unit, unit_of, units
from torchrl_ext.errors import ConfigError
from torchrl_ext.kernels.base import Kernels, Words, flat_bits, kernels_on, unsigned
from torchrl_ext.kernels.host import Part, Search
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.finite import nought_of

__all__ = ["decode_tensors", "Where", "encode_tensor", "encode_tensors", "worker_threads"]

_SMALL = 1 << 20  # units: smaller tensors share a task, so that handing them over costs less than coding them
_MOST_SPARE = 4  # several workers of an engine share a host
_RANGE = 1 << 26  # units: bounds what a list, and the part of a tensor that has to be brought there, take on a device
_Result = TypeVar("_Result")
_AHEAD = 1 << 30  # bytes of new tensors that may wait to be coded, beside the two that are due next
_Row = tuple[ParamMeta, Tensor, Tensor, "Where"]  # a parameter, its old and its new tensor, and where they lie
_Coded = tuple[bytes, int, Words | None, bool]
"""Of a block: payload, units that changed, what they add to the digest, whether they are known to be finite."""
_IsFinite = Callable[[np.ndarray], bool]
_Map = Callable[..., Iterator[_Coded]]
"""`map`, or that of a pool, which begins at once."""


Where = int | Callable[[np.ndarray], np.ndarray]
"""Where a tensor's units lie in a larger one, for the digest: one after the other from this position on, or a function
from flat positions in the tensor to those in the larger one."""


class _Begun(NamedTuple):
    """A tensor whose blocks are coded while they are asked for, or before."""

    meta: ParamMeta
    codec: Codec
    units: int
    blocks: Iterator[_Coded]


def worker_threads(*, beside_model: bool = False) -> int:
    """Return how many threads may work: one per core that this process may use.

    Args:
        beside_model: only on cores that torch leaves free, from 1 to 4 of them. An engine on a GPU computes on one core
            or few; one on the host on all of them, unless it was told otherwise.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        cores = os.cpu_count() or 1
    return max(1, min(_MOST_SPARE, cores - torch.get_num_threads())) if beside_model else cores


def encode_tensors(
    pairs: Iterable[tuple[str, Tensor, Tensor]],
    codec: Codec,
    *,
    threads: int | None = None,
    follow: bool = False,
    kernels: Kernels | None = None,
    where: Callable[[], Where] = int,
    look: bool = False,
) -> Iterator[Encoded]:
    """Code the change of many tensors, on the host or on an accelerator.

    Large tensors are cut into the codec's blocks, small ones on the host share a task. ``pairs`` is consumed by the
    caller's thread, a few tasks and about a GiB ahead of what is yielded, so that neither tensors nor payloads pile up.

    Args:
        pairs: ``(name, old, new)``; both tensors stay as they are until their result was yielded.
        codec: the encoding.
        threads: worker threads; by default one per core.
        follow: copy each new tensor into the old one, which is contiguous, at the latest when its result is yielded. On
            the host this is done as soon as a block was coded, while it is in the processor's cache.
        kernels: find what changed; by default those of each tensor's device.
        where: says of the pair that was taken last where its units lie in the tensor whose digest changes.
        look: look for NaN and infinity in new elements that differ from the old ones (`Encoded.finite`).

    Yields:
        One result per pair, in order; an empty payload where nothing changed.

    Raises:
        ManifestError: old and new do not agree; names the tensor.
    """
    threads = max(1, worker_threads() if threads is None else threads)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="codec")
    waiting, sizes = deque[Callable[[], list[Encoded]]](), deque[int]()
    begin, small, held = partial(_begin, codec, follow, kernels, look), list[_Row](), 0
    try:
        for name, old, new in pairs:
            row = ParamMeta.of(name, new), old, new, where()
            on_host = old.device.type == new.device.type == "cpu" and (kernels is None or kernels.on_host)
            together = on_host and row[0].numel < _SMALL
            if small and (held >= _SMALL or not together):
                waiting.append(pool.submit(_finished, map(partial(begin, map), small)).result)
                sizes.append(sum(one[0].nbytes for one in small))
                small, held = [], 0
            if together:
                small.append(row)
                held += row[0].numel
            else:
                waiting.append(partial(_finished, (begin(pool.map, row),)))
                sizes.append(row[0].nbytes)
            while len(waiting) > 2 * threads + 1 or (len(waiting) > 2 and sum(sizes) > _AHEAD):
                sizes.popleft()
                yield from waiting.popleft()()
        if small:
            waiting.append(pool.submit(_finished, map(partial(begin, map), small)).result)
        while waiting:
            yield from waiting.popleft()()
    finally:  # also when the caller stops early, or a task failed
        pool.shutdown(wait=True, cancel_futures=True)


def encode_tensor(codec: Codec, meta: ParamMeta, old: Tensor, new: Tensor) -> Encoded:
    """Code the change of one tensor in this thread.

    Raises:
        ManifestError: the tensors do not have ``meta``'s dtype and shape.
    """
    return _finished([_begin(codec, False, None, False, map, (meta, old, new, 0))])[0]


def _begin(codec: Codec, follow: bool, kernels: Kernels | None, look: bool, each: _Map, row: _Row) -> _Begun:
    """Cut one tensor into blocks, and begin to find and code what changed in each.

    On the host both are done by ``each``. On an accelerator what changed is found here, and only that comes to the host
    to be coded; a codec that reads whole tensors gets both copied.

    Args:
        codec: the encoding; it may choose another one.
        follow: make the old tensor, which is contiguous, what the new one is, at the latest when all blocks are coded.
        kernels: find what changed; by default those of the accelerator that either tensor is on, else the host's.
        look: look whether what changed is finite.
        each: maps a function over blocks.
        row: parameter, old and new tensor, on any device; on the host, both must stay as they are until it is finished;
            and where they lie.

    Raises:
        ManifestError: the tensors do not have the dtype and shape of the parameter; names it.
        ConfigError: the old tensor cannot follow.
    """
    meta, old, new, where = row
    check_same(meta, old, new)
    if follow and not old.is_contiguous():
        raise ConfigError("a tensor that is to follow must be contiguous")
    unit, device = unit_of(meta.dtype), old.device if new.device.type == "cpu" else new.device
    kernels = kernels or kernels_on(device)
    before, after = flat_bits(old), flat_bits(new)
    codec, count = codec.choose(unit, before, after), after.numel()
    finite = partial(_are_finite, meta.dtype) if look and meta.dtype.is_floating_point else None
    on_host, size = kernels.on_host, codec.block_units(unit, count)
    if codec.reads in ("all", "new") and not on_host:
        on_host, before, after = True, before.cpu(), after.cpu()
        if follow and old.device.type != "cpu":
            old.copy_(new)
            follow = False
    if on_host:
        olds, news = before.numpy().view(unit.dtype), after.numpy().view(unit.dtype)
        blocks = each(partial(_block, codec, unit, finite, olds, news, size, follow, where), range(0, count, size))
    else:
        blocks = each(
            partial(_coded, codec, unit, finite), _listed(unit, kernels, device, (before, after), size, follow, where)
        )
    return _Begun(meta, codec, count, blocks)


def _finished(rows: Iterable[_Begun]) -> list[Encoded]:
    """Wait for the blocks of tensors, and join them."""
    found = []
    for meta, codec, count, blocks in rows:
        payloads, changed, first, second, seen, finite = list[bytes](), 0, 0, 0, True, True
        for payload, more, words, good in blocks:
            payloads.append(payload)
            changed += more
            finite &= good
            if words is None:
                seen = False
            else:
                first, second = first + words[0], second + words[1]
        joined = codec.join(count, payloads) if changed else b""
        digest = (first % 2**64, second % 2**64) if seen else None
        found.append(Encoded(meta=meta, codec=codec, payload=joined, changed=changed, digest=digest, finite=finite))
    return found


def _block(
    codec: Codec,
    unit: Unit,
    finite: _IsFinite | None,
    olds: np.ndarray,
    news: np.ndarray,
    size: int,
    follow: bool,
    where: Where,
    start: int,
) -> _Coded:
    """Find and code what changed in one block on the host."""
    old, new = olds[start : start + size], news[start : start + size]
    first, positions = (start + where, None) if isinstance(where, int) else (start, where)
    search = Search(old=old, new=new, start=first, positions=positions, good=finite)
    whole = codec.reads in ("either", "new")
    if whole:
        from torchrl_ext.kernels.host_loops import count_changed

        search.changed = int(count_changed(old, new))
        if codec.reads == "either" and not search.changed:
            return b"", 0, None, True
    payload = codec.encode_block(unit, Block(start=start, size=new.size, parts=search, old=old, new=new))
    if follow and search.only is not None and search.changed < new.size // 32:
        old[search.only.places] = search.only.after
    elif follow and search.changed:
        old[:] = new
    if whole and search.changed:
        search.sound = finite is not None and finite(new)
    return payload, search.changed, None if whole else search.words, search.sound


def _are_finite(dtype: torch.dtype, bits: np.ndarray) -> bool:
    if bits.itemsize == 1:  # dtypes without an infinity, too
        return nought_of(torch.from_numpy(bits).view(dtype)).item() == 0.0
    infinity, but_sign = _infinity(dtype)
    return bool((bits & but_sign).max() < infinity)


@cache
def _infinity(dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the bits of an infinity, above which are those of every NaN, and all bits but the sign."""
    bits = units(torch.tensor(torch.inf, dtype=dtype))[0]
    return bits, bits | (bits - 1)


def _coded(codec: Codec, unit: Unit, finite: _IsFinite | None, listed: tuple[Block, int, Words]) -> _Coded:
    """Code what was found in one block on an accelerator."""
    block, changed, words = listed
    good = all(finite is not None and finite(part.after) for part in block.parts)
    return codec.encode_block(unit, block) if changed else b"", changed, words, good


def _listed(
    unit: Unit, kernels: Kernels, device: torch.device, bits: tuple[Tensor, Tensor], size: int, follow: bool, at: Where
) -> list[tuple[Block, int, Words]]:
    """Find what changed in a tensor on an accelerator; neither tensor is needed afterwards.

    Returns:
        Blocks, how much changed in each, and what that adds to the digest: all of it with the first one.
    """
    count, first, second = bits[1].numel(), 0, 0
    offset = at if isinstance(at, int) else 0
    lists: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for start in range(0, count, _RANGE):
        old, new = (every[start : start + _RANGE] for every in bits)
        diff = kernels.diff(old.to(device, non_blocking=True), new.to(device, non_blocking=True), start + offset)
        if not diff.places.numel():
            continue
        first, second = first + diff.words[0], second + diff.words[1]
        places, was, now = _on_host(diff.places, diff.before, diff.after)
        if follow and old.device == device:
            kernels.scatter(old, diff.places, diff.after)
        elif follow:
            kernels_on(old.device).scatter(old, places.to(old.device), now.to(old.device))
        lists.append((places.numpy().astype(np.int64) + start, unsigned(was), unsigned(now)))
    if not lists:
        return []
    every, olds, news = (np.concatenate(each) if len(lists) > 1 else each[0] for each in zip(*lists, strict=True))
    if not isinstance(at, int):
        from torchrl_ext.kernels.host_loops import digest_change

        moved = np.zeros(2, np.uint64)
        digest_change(at(every), olds, news, moved)
        first, second = moved.tolist()
    starts = range(0, count, size)
    cuts, found = np.searchsorted(every, [*starts, count]).tolist(), []
    for number, start in enumerate(starts):
        own = slice(cuts[number], cuts[number + 1])
        inside = (every[own] - start).astype(np.int32 if size < 2**31 else np.int64)
        part = Part(inside, olds[own].view(unit.dtype), news[own].view(unit.dtype))
        block = Block(start=start, size=min(size, count - start), parts=(part,) if part.places.size else ())
        found.append((block, part.places.size, (first, second) if number == 0 else (0, 0)))
    return found


def _on_host(*tensors: Tensor) -> list[Tensor]:
    """Return copies on the host, or the tensors that are there; through pinned memory, at the speed of the bus."""
    if not tensors[0].is_cuda:
        return [tensor.cpu() for tensor in tensors]
    copies: list[Any] = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies


def decode_tensors(decodes: Iterable[Callable[[], _Result]], *, threads: int) -> Iterator[_Result]:
    """Yield what each call returns, in order; a few calls run ahead of what is yielded.

    Args:
        decodes: each decodes the change of one tensor; the iterable is consumed by the caller's thread.
        threads: worker threads; with 1 the caller's own decodes, one at a time.

    Raises:
        IntegrityError: a payload is damaged; names the tensor.
    """
    if threads == 1:
        for decode in decodes:
            yield decode()
        return
    pool, waiting = ThreadPoolExecutor(threads, thread_name_prefix="codec"), deque[Future[_Result]]()
    try:
        for decode in decodes:
            waiting.append(pool.submit(decode))
            if len(waiting) > 2 * threads + 1:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:  # also when the caller stops early, or a task failed
        pool.shutdown(wait=True, cancel_futures=True)
