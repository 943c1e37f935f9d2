"""Weights that lie in shared memory already: handed over where they are, so that they are copied once and not twice.

A policy is put there by torch's own ``policy.share_memory()`` (TorchRL's collectors do it to theirs). Linux says which
file backs which addresses (``/proc/self/maps``, proc(5)); one that this process also holds open can be mapped by any
process of the same user, as the staging buffer is. Workers keep what they mapped until the trainer leaves: mapping
anew costs a page fault every few KiB, which was measured to take half as long as the copy.
"""

from __future__ import annotations

import bisect
import json
import os
import stat
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.errors import IntegrityError, ManifestError, TransportError
from torchrl_ext.transports.buckets import Lander
from torchrl_ext.transports.ipc.host_memory import Segment, attach, host_handle
from torchrl_ext.transports.links import Link
from torchrl_ext.types import Info, ParamMeta

__all__ = ["Borrowed", "Offer", "groups", "offer"]

_LOOK_S = 0.5
_SLICE_BYTES = 2 << 20  # what a thread copies at a time
_AHEAD = 4  # groups that are copied while one is handed on: no thread waits for the slowest of a group


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The places of all tensors of an update, in files that are mapped into memory.

    Attributes:
        info: JSON-safe: ``files`` (handles, see `torchrl_ext.transports.ipc.host_memory`) and ``rows``, one for each
            tensor in the order of the update: index of the file, offset in bytes.
        addresses: where each tensor lies in this process.
    """

    info: Info
    addresses: tuple[int, ...]

    def check(self, number: int, tensor: Tensor) -> None:
        """Raise a ManifestError where tensor ``number`` of the pass is not the one that was offered."""
        if tensor.data_ptr() != self.addresses[number]:
            raise ManifestError(
                f"parameter {number} of the source moved in memory while it was sent",
                hint="leave the model alone until update_weights returns",
            )


def offer(params: Sequence[ParamMeta], held: Mapping[str, Tensor]) -> Offer | None:
    """Return where the tensors of an update lie; None unless each of them is in memory that others can map.

    Args:
        params: what the update sends.
        held: tensors that will be sent as they are (`WeightSource.held`).
    """
    tensors = [held[meta.name] for meta in params if meta.name in held]
    if not tensors or len(tensors) < len(params) or not all(map(_shareable, tensors)):
        return None
    files: list[Info] = []
    rows: list[list[int]] = []
    known: dict[tuple[int, int], int] = {}
    starts, regions = _mapped()
    descriptors = _descriptors()
    for tensor in tensors:
        address = tensor.data_ptr()
        position = bisect.bisect_right(starts, address) - 1
        begin, end, offset, inode = regions[position] if position >= 0 else (0, 0, 0, (0, 0))
        if not begin <= address <= address + tensor.nbytes <= end or inode not in descriptors:
            return None
        if inode not in known:
            known[inode] = len(files)
            files.append(descriptors[inode])
        rows.append([known[inode], offset + address - begin])
    return Offer(info={"files": files, "rows": rows}, addresses=tuple(tensor.data_ptr() for tensor in tensors))


def _shareable(tensor: Tensor) -> bool:
    plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.is_shared() and plain and tensor.nbytes > 0


def _mapped() -> tuple[list[int], list[tuple[int, int, int, tuple[int, int]]]]:
    """Return this process's shared file mappings, by address: begin, end, offset in the file, device and inode."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, offset, device, inode, *_ = line.split(maxsplit=5)
        if rights[3] == "s" and inode != "0":
            begin, end = (int(word, 16) for word in span.split("-"))
            major, minor = (int(word, 16) for word in device.split(":"))
            found.append((begin, end, int(offset, 16), (os.makedev(major, minor), int(inode))))
    found.sort()
    return [begin for begin, *_ in found], found


def _descriptors() -> dict[tuple[int, int], Info]:
    """Return a handle for each regular file that this process holds open, by device and inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            about = os.fstat(int(name))
        except OSError:  # closed meanwhile
            continue
        if stat.S_ISREG(about.st_mode):
            found[about.st_dev, about.st_ino] = host_handle(int(name), about)
    return found


class Borrowed:
    """Maps a trainer's own tensors for as long as the trainer lives, and copies from them (worker end).

    Attributes:
        unreachable: whether the last handoff could not be mapped; nothing is mapped then.
    """

    def __init__(self) -> None:
        self.unreachable = False
        self._lock = threading.Lock()
        self._files: dict[str, Segment] = {}
        self._watched: Link | None = None

    def take(
        self, info: Any, params: Sequence[ParamMeta], into: Mapping[str, Tensor], capacity: int
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Copy all tensors, and yield their pairs in order, one of `groups` at a time, in memory of this process.

        Args:
            info: `Offer.info`.
            params: what the update sends.
            into: tensors that are filled directly.
            capacity: see `groups`.

        Raises:
            TransportError: the trainer's memory cannot be reached.
            IntegrityError: a place that lies in none of the files.
        """
        sources = self._sources(info, params)
        lander = Lander(params, into, torch.device("cpu"))
        if sum(source.nbytes for source in sources) <= _SLICE_BYTES:  # starting a thread takes longer than this copy
            for first, stop in groups(params, capacity):
                for index in range(first, stop):
                    lander.begin(index).numpy()[:] = sources[index]
                yield [lander.end(index) for index in range(first, stop)]
            return
        running: deque[tuple[range, list[Future[None]]]] = deque()
        with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="ipc-copy") as threads:
            for first, stop in groups(params, capacity):
                pairs = [(sources[index], lander.begin(index).numpy()) for index in range(first, stop)]
                copies = [threads.submit(_copy_all, share) for share in _shares(pairs)]
                running.append((range(first, stop), copies))
                if len(running) > _AHEAD:
                    yield _finished(lander, *running.popleft())
            while running:
                yield _finished(lander, *running.popleft())

    def keep_while(self, link: Link) -> None:
        """Unmap everything as soon as the trainer at the other end of ``link`` is gone."""
        if self._watched is not link:
            self._watched = link
            threading.Thread(target=self._watch, args=(link,), name="ipc-borrowed", daemon=True).start()

    def close(self) -> None:
        """Unmap everything. May be called twice."""
        with self._lock:
            for segment in self._files.values():
                segment.close()
            self._files.clear()

    def _watch(self, link: Link) -> None:
        pause = threading.Event()
        while link.alive:
            pause.wait(_LOOK_S)
        if self._watched is link:
            self._watched = None
            self.close()

    def _sources(self, info: Any, params: Sequence[ParamMeta]) -> list[np.ndarray]:
        handles, rows = (info.get("files"), info.get("rows")) if isinstance(info, dict) else (None, None)
        if not isinstance(handles, list) or not isinstance(rows, list) or len(rows) != len(params):
            raise IntegrityError("the trainer does not say where its tensors are", expected="files, and a row for each")
        self.unreachable = False
        try:
            files = self._map(handles)
        except TransportError:
            self.unreachable = True
            self.close()
            raise
        sources = []
        for meta, row in zip(params, rows, strict=True):
            valid = isinstance(row, list) and len(row) == 2 and all(type(word) is int and word >= 0 for word in row)
            nbytes = files[row[0]].flat.numel() if valid and row[0] < len(files) else -1
            if not valid or row[1] + meta.nbytes > nbytes:
                raise IntegrityError(f"{meta.name} is said to be at {row!r}", expected="a place inside of a file")
            sources.append(files[row[0]].flat.numpy()[row[1] : row[1] + meta.nbytes])
        return sources

    def _map(self, handles: Sequence[Any]) -> list[Segment]:
        """Return the mapped files, and keep the mappings that the last update used too."""
        keys = [json.dumps(handle) for handle in handles]
        with self._lock:
            for key, handle in zip(keys, handles, strict=True):
                if key not in self._files:
                    self._files[key] = attach(handle, sealed=False)
            for key in self._files.keys() - set(keys):
                self._files.pop(key).close()
            return [self._files[key] for key in keys]


def _finished(lander: Lander, group: range, copies: Sequence[Future[None]]) -> list[tuple[str, Tensor]]:
    """Return the pairs of one of `groups`, once they are copied."""
    for one in copies:
        one.result()
    return [lander.end(index) for index in group]


def groups(params: Sequence[ParamMeta], capacity: int) -> list[tuple[int, int]]:
    """Return ranges of parameters, first and stop, of ``capacity`` bytes at most, or of one parameter."""
    cuts, first, nbytes = [], 0, 0
    for index, meta in enumerate(params):
        if nbytes and nbytes + meta.nbytes > capacity:
            cuts.append((first, index))
            first, nbytes = index, 0
        nbytes += meta.nbytes
    return [*cuts, (first, len(params))]


def _shares(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
    """Yield what a thread copies at a time: a slice of a tensor, or many small ones."""
    share, nbytes = [], 0
    for source, target in pairs:
        for begin in range(0, source.nbytes, _SLICE_BYTES):
            cut = slice(begin, begin + _SLICE_BYTES)
            share.append((source[cut], target[cut]))
            nbytes += share[-1][0].nbytes
            if nbytes >= _SLICE_BYTES:
                yield share
                share, nbytes = [], 0
    if share:
        yield share


def _copy_all(share: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    for source, target in share:
        target[:] = source
