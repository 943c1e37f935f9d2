"""The coding of many tensors by several threads: results come out in order while later tensors are worked on."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from torchrl_ext.base.devices import recorded, settle, wait_for
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.deltas.patch import SparsePatch, diff

__all__ = ["decode_tensors", "differences", "worker_threads"]

_MOST_SPARE = 4  # several workers of an engine share a host
_MOST_AT_ONCE = 8  # threads that code whole tensors, each of which takes a few times the memory of one
_Result = TypeVar("_Result")


def worker_threads(*, beside_model: bool = False) -> int:
    """Return how many threads may work: one per core that this process may use.

    Args:
        beside_model: only on cores that torch leaves free, from 1 to 4 of them. An engine on a GPU computes on one core
            or few; one on the host on all of them, unless a setting says otherwise.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        cores = os.cpu_count() or 1
    return max(1, min(_MOST_SPARE, cores - torch.get_num_threads())) if beside_model else cores


def differences(pairs: Iterable[tuple[str, Tensor, Tensor]], *, threads: int | None = None) -> Iterator[SparsePatch]:
    """Yield what changed in each of many tensors, in order; each new tensor is copied into the old one by then.

    Args:
        pairs: ``(name, old, new)``, consumed by the caller's thread, a few ahead of what is yielded; both tensors stay
            as they are until their result was yielded.
        threads: worker threads; by default one per core, and not more than 8.

    Raises:
        ManifestError: old and new do not agree; names the tensor.
    """

    def begun(name: str, old: Tensor, new: Tensor) -> Callable[[], SparsePatch]:
        made = recorded((old.device, new.device))

        def found() -> SparsePatch:
            wait_for(made)
            patch = diff(ParamMeta.of(name, new), old, new)
            if patch.changed:
                old.copy_(new)
                settle((old.device, new.device))  # the caller reads the one, and may free the other
            return patch

        return found

    threads = min(_MOST_AT_ONCE, worker_threads()) if threads is None else threads
    yield from decode_tensors((begun(*pair) for pair in pairs), threads=threads)


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
