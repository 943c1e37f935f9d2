"""Many tensors, several threads: payloads come out in order while later tensors are still scanned."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.codecs.base import Codec, Encoded, Piece
from torchrl_ext.codecs.listing import choose, encode_on_device, working_device
from torchrl_ext.codecs.patch import same
from torchrl_ext.codecs.units import Layout, layout_of, writable_units
from torchrl_ext.kernels.base import Kernels
from torchrl_ext.kernels.select import kernels_on
from torchrl_ext.types import ParamMeta

__all__ = ["decode_tensors", "encode_tensors", "spare_threads", "worker_threads"]

_SMALL = 1 << 20  # units: smaller tensors share a task, so that handing them over costs less than coding them
_MOST_SPARE = 4  # several workers of an engine share a host
_Result = TypeVar("_Result")


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
    """Code the change of many tensors.

    Large tensors are cut into the codec's pieces, small ones share a task. ``pairs`` is consumed by the caller's
    thread, a few tasks ahead of what is yielded, so that neither tensors nor payloads pile up. Where a tensor is on an
    accelerator, its changes are listed there and nothing else is copied, if the codec can code a list; else both are
    copied to the host.

    Args:
        pairs: ``(name, old, new)``; both tensors stay as they are until their result was yielded.
        codec: how.
        threads: worker threads; by default one per core.
        follow: make each old tensor the new one, at the latest when its result is yielded; old tensors must be
            contiguous then. On the host this is done as soon as a piece was coded, while the processor has it at hand.
        kernels: list changes; by default those of each tensor's device.

    Yields:
        One result per pair, in order; an empty payload where nothing changed.

    Raises:
        ManifestError: old and new do not agree; names the tensor.
    """
    threads = worker_threads() if threads is None else threads

    def tasks(submit: Callable[..., Future[Any]]) -> Iterator[list[Callable[[], Encoded]]]:
        small: list[tuple[ParamMeta, Tensor, Tensor]] = []
        held = 0
        for name, old, new in pairs:
            meta = ParamMeta.of(name, new)
            own = kernels or kernels_on(working_device(old, new))
            if not own.on_host:
                if small:
                    yield _batch(submit, codec, small, follow)
                    small, held = [], 0
                yield [_elsewhere(submit, codec, own, meta, old, new, follow)]
                continue
            if meta.numel < _SMALL:
                small.append((meta, old, new))
                held += meta.numel
                if held >= _SMALL:
                    yield _batch(submit, codec, small, follow)
                    small, held = [], 0
                continue
            if small:
                yield _batch(submit, codec, small, follow)
                small, held = [], 0
            yield [_large(submit, codec, meta, old, new, follow)]
        if small:
            yield _batch(submit, codec, small, follow)

    yield from _ordered(tasks, threads)


def _elsewhere(submit, codec, kernels, meta, old, new, follow):
    """A tensor on an accelerator."""
    chosen = choose(codec, meta, old, new)
    if chosen.by_list:
        return encode_on_device(submit, chosen, kernels, meta, old, new, follow)
    before, after = old.cpu(), new.cpu()
    result = _large(submit, chosen, meta, before, after, follow)
    if not follow or old.device.type == "cpu":
        return result

    def followed() -> Encoded:
        coded = result()
        old.copy_(after)
        return coded

    return followed


def _batch(submit, codec, small, follow):
    def whole(meta: ParamMeta, old: Tensor, new: Tensor) -> Encoded:
        coded = codec.encode(meta, old, new)
        if follow and coded.changed:
            old.copy_(new)
        return coded

    future = submit(lambda: [whole(*row) for row in small])
    return [lambda row=row: future.result()[row] for row in range(len(small))]


def _large(submit, codec, meta, old, new, follow):
    layout = layout_of(meta.dtype)
    before, after = same(meta, old, new)
    chosen = codec.choose(layout, before, after)
    if follow:
        before = writable_units(old)
    size = chosen.piece_units(layout, after.size)
    futures = [
        submit(_piece, chosen, layout, before[at : at + size], after[at : at + size], at, follow)
        for at in range(0, after.size, size)
    ]
    return lambda: chosen.finish(meta, [future.result() for future in futures])


def _piece(codec: Codec, layout: Layout, old: np.ndarray, new: np.ndarray, start: int, follow: bool) -> Piece:
    piece = codec.encode_piece(layout, old, new, start)
    if follow and piece.changed:
        from torchrl_ext.codecs.scan import follow as write_changes

        write_changes(old, new)
    return piece


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
