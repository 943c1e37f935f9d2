"""Versions over a broadcast: the files that a shared directory would hold, sent through a collective group.

Each end keeps a private directory; what the trainer publishes into its own appears in those of the workers. So a delta
is the same bytes by either road, and everything that reads or writes one is the same code.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.errors import DeadlineError, TransportError
from torchrl_ext.stores import LocalStore, version_name
from torchrl_ext.stores.versions import Versions
from torchrl_ext.transports.base import deadline
from torchrl_ext.transports.collective import VLLMCollectiveTransport
from torchrl_ext.types import Handoff, Info
from torchrl_ext.weights.source import MappingSource

__all__ = ["VersionWire", "private_root"]


_PREFIX = "torchrl_ext-"


def private_root(owner: Any) -> str:
    """A directory of this process, in memory where the system has a filesystem there; goes with ``owner``.

    Those of processes that were killed are swept.
    """
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    for left in parent.glob(f"{_PREFIX}[0-9]*-*"):
        if not _lives(int(left.name.removeprefix(_PREFIX).split("-")[0])):
            shutil.rmtree(left, ignore_errors=True)
    path = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent)
    weakref.finalize(owner, shutil.rmtree, path, ignore_errors=True)
    return path


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class VersionWire:
    """Both ends of the broadcast.

    Args:
        inner: the group.
        store: this end's private directory.
    """

    def __init__(self, inner: VLLMCollectiveTransport, store: LocalStore) -> None:
        self.inner, self._store, self._versions = inner, store, Versions(store)

    def open(self, workers: int) -> Handoff:
        """Trainer end: as `Transport.open`."""
        return self.inner.open(workers, ())

    def join(self, info: Info) -> None:
        """Worker end: enter the group that `open` announced."""
        self.inner = VLLMCollectiveTransport.from_info(info)
        self.inner.join(info)

    def require_trainer(self) -> None:
        """Refuse to send from a worker.

        Raises:
            TransportError: this is not rank 0.
        """
        if self.inner.rank != 0:
            raise TransportError(
                f"send_weights was called on rank {self.inner.rank}",
                expected="rank 0, the trainer; other ranks receive",
                state="nothing was sent",
            )

    def push(self, version: int) -> None:
        """Trainer end: send every file of a version; returns when every worker has them.

        Raises:
            TransportError, DeadlineError: a worker is gone or does not answer; names its rank.
        """
        folder = self._store.path(version_name(version))
        files = {str(path.relative_to(folder)): _bytes(path) for path in sorted(folder.rglob("*")) if path.is_file()}
        for handoff in self.inner.prepare(MappingSource(files), version):
            self.inner.announce(handoff.info)
            handoff.transfer()

    def pull(self, timeout_s: float) -> int | None:
        """Worker end: take in the next version; None when none is announced within ``timeout_s`` seconds.

        Raises:
            TransportError, DeadlineError: the trainer is gone, or stopped half-way.
        """
        info = self.inner.poll(timeout_s)
        if info is None:
            return None
        self._store.own()
        version = int(info["version"])
        self._store.delete(version_name(version))  # a trainer that started over counts anew
        with self._store.draft(version_name(version)) as draft:
            for name, tensor in self.inner.receive(info, {}):
                draft.write(name, memoryview(tensor.numpy()))
        if version < self._versions.latest():
            self._store.delete("latest")
        self._versions.advance(version)
        return version

    def await_version(self, version: int) -> None:
        """Worker end: take in versions until ``version`` is there.

        Raises:
            DeadlineError: it did not come in time.
        """
        until = deadline(self.inner.timeout_s)
        while self._versions.latest() != version:
            if self.pull(max(0.0, until - time.monotonic())) is None:
                raise DeadlineError(
                    f"weights version {version} did not come over the group within {self.inner.timeout_s:g} s",
                    state="nothing was changed",
                    hint="check that the trainer lives, and send again",
                )


def _bytes(path: Path) -> Tensor:
    if path.stat().st_size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c"))
