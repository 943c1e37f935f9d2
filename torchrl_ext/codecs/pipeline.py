"""Many tensors, several threads: payloads come out in order while later tensors are still scanned."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.codecs.base import Block, Codec, Encoded, Part
from torchrl_ext.codecs.patch import check_same
from torchrl_ext.codecs.units import Unit, unit_of
from torchrl_ext.errors import ConfigError
from torchrl_ext.kernels.base import Kernels, Words, flat_bits, unsigned
from torchrl_ext.kernels.host import find
from torchrl_ext.kernels.select import kernels_on
from torchrl_ext.types import ParamMeta

__all__ = ["decode_tensors", "encode_tensor", "encode_tensors", "spare_threads", "worker_threads"]

_SMALL = 1 << 20  # units: smaller tensors share a task, so that handing them over costs less than coding them
_MOST_SPARE = 4  # several workers of an engine share a host
_RANGE = 1 << 26  # units: bounds what a list, and the part of a tensor that has to be brought there, take on a device
_Result = TypeVar("_Result")
_Coded = tuple[bytes, int, Words | None]  # of a block: payload, units that changed, what they add to the digest
_Submit = Callable[..., Callable[[], Any]]
"""Calls a function with arguments, at once or in another thread; what it returns waits for the result."""


def worker_threads() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1


def spare_threads() -> int:
    """Threads for work beside a model that is in use: cores that torch does not compute on, at least 1 and at most 4.

    An engine on a GPU computes on one core or few; one on the host on all of them, unless it was told otherwise.
    """
    return max(1, min(_MOST_SPARE, worker_threads() - torch.get_num_threads()))


def encode_tensors(
    pairs: Iterable[tuple[str, Tensor, Tensor]],
    codec: Codec,
    *,
    threads: int | None = None,
    follow: bool = False,
    kernels: Kernels | None = None,
) -> Iterator[Encoded]:
    """Code the change of many tensors, on the host or on an accelerator.

    Large tensors are cut into the codec's blocks, small ones on the host share a task. ``pairs`` is consumed by the
    caller's thread, a few tasks ahead of what is yielded, so that neither tensors nor payloads pile up.

    Args:
        pairs: ``(name, old, new)``; both tensors stay as they are until their result was yielded.
        codec: how.
        threads: worker threads; by default one per core.
        follow: make each old tensor, which is contiguous, the new one, at the latest when its result is yielded. On the
            host this is done as soon as a block was coded, while the processor has it at hand.
        kernels: find what changed; by default those of each tensor's device.

    Yields:
        One result per pair, in order; an empty payload where nothing changed.

    Raises:
        ManifestError: old and new do not agree; names the tensor.
    """
    threads = worker_threads() if threads is None else threads

    def tasks(submit: Callable[..., Future[Any]]) -> Iterator[list[Callable[[], Encoded]]]:
        small: list[tuple[ParamMeta, Tensor, Tensor]] = []

        def batch() -> list[Callable[[], Encoded]]:
            rows = small.copy()
            small.clear()
            future = submit(lambda: [_encoding(codec, *row, follow=follow, kernels=kernels)() for row in rows])
            return [partial(_one_of, future, row) for row in range(len(rows))]

        held = 0
        for name, old, new in pairs:
            meta = ParamMeta.of(name, new)
            on_host = old.device.type == new.device.type == "cpu" and (kernels is None or kernels.on_host)
            if on_host and meta.numel < _SMALL:
                small.append((meta, old, new))
                held += meta.numel
                if held >= _SMALL:
                    yield batch()
                    held = 0
                continue
            if small:
                yield batch()
                held = 0
            call = partial(_submitted, submit)
            yield [_encoding(codec, meta, old, new, submit=call, follow=follow, kernels=kernels)]
        if small:
            yield batch()

    yield from _ordered(tasks, threads)


def _submitted(submit: Callable[..., Future[Any]], *call: Any) -> Callable[[], Any]:
    return submit(*call).result


def _one_of(batch: Future[list[Encoded]], number: int) -> Encoded:
    return batch.result()[number]


def encode_tensor(codec: Codec, meta: ParamMeta, old: Tensor, new: Tensor) -> Encoded:
    """Code the change of one tensor in this thread.

    Raises:
        ManifestError: the tensors do not have ``meta``'s dtype and shape.
    """
    return _encoding(codec, meta, old, new)()


def _at_once(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    result = function(*args)
    return lambda: result


def _encoding(
    codec: Codec,
    meta: ParamMeta,
    old: Tensor,
    new: Tensor,
    *,
    submit: _Submit = _at_once,
    follow: bool = False,
    kernels: Kernels | None = None,
) -> Callable[[], Encoded]:
    """Find what changed in one tensor, and have it coded block by block.

    On the host every block is a task of its own, which finds and codes. On an accelerator what changed is found by the
    caller's thread, and only that comes to the host to be coded; a codec that reads whole tensors gets both copied.

    Args:
        codec: how.
        meta: the parameter.
        old, new: its tensors, on any device.
        submit: calls tasks.
        follow: make ``old``, which is contiguous, what ``new`` is, at the latest when the result is there.
        kernels: find what changed; by default those of the accelerator that either tensor is on, else the host's.

    Returns:
        Waits for the result. On the host, both tensors must stay as they are until then.

    Raises:
        ManifestError: the tensors do not have ``meta``'s dtype and shape; names the tensor.
        ConfigError: ``old`` cannot follow.
    """
    check_same(meta, old, new)
    if follow and not old.is_contiguous():
        raise ConfigError("a tensor that is to follow must be contiguous")
    unit, device = unit_of(meta.dtype), old.device if new.device.type == "cpu" else new.device
    kernels = kernels or kernels_on(device)
    before, after = flat_bits(old), flat_bits(new)
    codec, count = codec.choose(unit, before, after), after.numel()
    on_host = kernels.on_host
    if codec.reads in ("all", "new") and not on_host:
        on_host, before, after = True, before.cpu(), after.cpu()
        if follow and old.device.type != "cpu":
            old.copy_(new)
            follow = False
    size = codec.block_units(unit, count)
    if on_host:
        olds, news = unsigned(before), unsigned(after)
        tasks = [
            submit(_block, codec, unit, olds[at : at + size], news[at : at + size], at, follow)
            for at in range(0, count, size)
        ]
    else:
        tasks = _listed(codec, unit, kernels, device, before, after, size, submit, follow)

    def result() -> Encoded:
        blocks = [task() for task in tasks]
        changed, words = sum(more for _, more, _ in blocks), [added for *_, added in blocks if added is not None]
        payload = codec.join(unit, count, [coded for coded, *_ in blocks]) if changed else b""
        digest = _sum(words) if len(words) == len(blocks) else None
        return Encoded(meta=meta, codec=codec, payload=payload, changed=changed, digest=digest)

    return result


def _sum(words: Iterable[Words]) -> Words:
    first, second = 0, 0
    for one, two in words:
        first, second = first + one, second + two
    return first % 2**64, second % 2**64


@final
class _Search:
    """What changed in a block on the host: found part by part, in lists that stay in the cache and are used again.

    Attributes:
        changed: units that did, in what was iterated.
        words: what they add to the digest.
        first: the first part, which is all of it where little changed.
    """

    def __init__(self, old: np.ndarray, new: np.ndarray, start: int) -> None:
        self._old, self._new, self._start = old, new, start
        self.changed, self.words = 0, (0, 0)
        self.first, self._held = find(old, new, start), True

    @property
    def complete(self) -> bool:
        """Whether the first part is all of it."""
        return self.first.end == self._old.size

    def __iter__(self) -> Iterator[Part]:
        found = self.first if self._held else find(self._old, self._new, self._start)
        self.changed, self.words = 0, (0, 0)
        while True:
            self.changed, self.words = self.changed + found.places.size, _sum((self.words, found.words))
            yield Part(found.places, found.before, found.after)
            if found.end == self._old.size:
                return
            self._held = False
            found = find(self._old, self._new, self._start, found.end)


def _block(codec: Codec, unit: Unit, old: np.ndarray, new: np.ndarray, start: int, follow: bool) -> _Coded:
    """Find and code what changed in one block on the host."""
    if codec.reads in ("either", "new"):
        from torchrl_ext.kernels.host_loops import count_changed

        changed = int(count_changed(old, new))
        needed = changed or codec.reads == "new"
        payload = codec.encode_block(unit, Block(start=start, size=new.size, old=old, new=new)) if needed else b""
        if follow and changed:
            old[:] = new
        return payload, changed, None
    search = _Search(old, new, start)
    if search.complete and not search.first.places.size:
        return b"", 0, (0, 0)
    most = search.first.places.size if search.complete else new.size
    payload = codec.encode_block(unit, Block(start=start, size=new.size, parts=search, most=most, old=old, new=new))
    changed, words = search.changed, search.words
    if follow and search.complete and changed < new.size // 32:
        old[search.first.places] = search.first.after
    elif follow:
        old[:] = new
    return payload, changed, words


def _listed(
    codec: Codec,
    unit: Unit,
    kernels: Kernels,
    device: torch.device,
    before: Tensor,
    after: Tensor,
    size: int,
    submit: _Submit,
    follow: bool,
) -> list[Callable[[], _Coded]]:
    """Find what changed in a tensor on an accelerator, and have it coded; neither tensor is needed afterwards."""
    count, first, second = after.numel(), 0, 0
    lists: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for start in range(0, count, _RANGE):
        old, new = (bits[start : start + _RANGE] for bits in (before, after))
        diff = kernels.diff(old.to(device, non_blocking=True), new.to(device, non_blocking=True), start)
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
    starts = range(0, count, size)
    cuts = np.searchsorted(every, [*starts, count]).tolist()

    def task(number: int, start: int) -> Callable[[], _Coded]:
        own = slice(cuts[number], cuts[number + 1])
        words = (first, second) if number == 0 else (0, 0)
        changed = own.stop - own.start
        if not changed:
            return lambda: (b"", 0, words)
        places = (every[own] - start).astype(np.int32 if size < 2**31 else np.int64)
        block = Block(
            start=start,
            size=min(size, count - start),
            parts=(Part(places, olds[own].view(unit.dtype), news[own].view(unit.dtype)),),
            most=changed,
        )
        payload = submit(codec.encode_block, unit, block)
        return lambda: (payload(), changed, words)

    return [task(number, start) for number, start in enumerate(starts)]


def _on_host(*tensors: Tensor) -> list[Tensor]:
    """Copies on the host (or the tensors, where they are there): through pinned memory, at the speed of the bus."""
    if not tensors[0].is_cuda:
        return [tensor.cpu() for tensor in tensors]
    copies: list[Any] = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies


def decode_tensors(decodes: Iterable[Callable[[], _Result]], *, threads: int) -> Iterator[_Result]:
    """What each call returns, in order; a few are made ahead of what is yielded.

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

    def tasks(submit: Callable[..., Future[_Result]]) -> Iterator[list[Callable[[], _Result]]]:
        for decode in decodes:
            yield [submit(decode).result]

    yield from _ordered(tasks, threads)


def _ordered(
    tasks: Callable[[Callable[..., Future[Any]]], Iterator[list[Callable[[], _Result]]]], threads: int
) -> Iterator[_Result]:
    """Results of tasks in order, at most a few tasks per thread ahead."""
    pool = ThreadPoolExecutor(max(1, threads), thread_name_prefix="codec")
    waiting: deque[list[Callable[[], _Result]]] = deque()
    try:
        for results in tasks(pool.submit):
            waiting.append(results)
            if len(waiting) > 2 * threads + 1:
                for result in waiting.popleft():
                    yield result()
        while waiting:
            for result in waiting.popleft():
                yield result()
    finally:  # also when the caller stops early, or a task failed
        pool.shutdown(wait=True, cancel_futures=True)
