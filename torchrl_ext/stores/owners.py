"""Ownership of a root in an object store, by keys that are only created: such stores have no locks.

    owners/000003       the newest owner: who it is, and until when it counts as alive

Most object stores can create a key only where there is none. Numbers only grow, each is created by one writer alone,
and the newest has the root. A writer that finds a newer number than its own has lost the root and writes no more. So a
trainer that was taken for dead does no harm when it comes back.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_ext.errors import IntegrityError, StoreError
from torchrl_ext.stores.base import seconds_left

if TYPE_CHECKING:
    from torchrl_ext.stores.object import ObjectStore

__all__ = ["OWNED_S", "Owners"]

OWNED_S = 300.0
"""How long an owner on another machine counts as alive after it began its last version, in seconds."""

_FOLDER = "owners"
_LARGEST = 4096  # bytes
_ATTEMPTS = 10
_HERE: weakref.WeakValueDictionary[str, Owners] = weakref.WeakValueDictionary()


class Owners:
    """Makes one writer the owner of a root, and checks that it still is.

    Args:
        store: the root.

    Attributes:
        number: of this writer among the owners; 0 while it is none.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store: ObjectStore = weakref.proxy(store)  # no cycle: a forgotten store is freed at once, and is no owner
        self._token = uuid.uuid4().hex
        self.number = 0

    def enter(self) -> None:
        """Become the newest owner of the root.

        Raises:
            StoreError: another one is alive, as far as can be known.
        """
        for _ in range(_ATTEMPTS):
            newest = self._newest()
            if newest:
                self._refuse_alive(newest)
            mine = newest + 1
            _HERE[self._token] = self
            if self._store.create(_key(mine), self._words(OWNED_S)):
                if self._newest() == mine:
                    break
                self._store.delete(_key(mine))  # a newer owner came while this one looked
        else:
            raise StoreError(
                f"{_ATTEMPTS} other trainers became the owner of {self._store.url} while this one tried",
                expected="one trainer per root",
                state="nothing was changed",
                hint="give this trainer its own root",
            )
        self.number = mine
        for number in self._numbers():
            if number < mine:
                self._store.delete(_key(number))

    def require(self) -> None:
        """Check that no other writer has taken the root, and note that this one is alive.

        Raises:
            StoreError: another one has the root now.
        """
        newest = self._newest()
        if newest != self.number:
            found = self._said(newest) if newest else {}
            raise StoreError(
                f"{self._store.url} has another owner now: trainer {found.get('pid')} on {found.get('host')}"
                if newest
                else f"{self._store.url} was emptied: this trainer's {_key(self.number)} is gone",
                expected="one trainer per root, and a root that stays",
                state="nothing was written; this trainer no longer publishes into this root",
                hint="end one of the two, or give this trainer its own root",
            )
        self._store.put(_key(self.number), self._words(OWNED_S))

    def leave(self) -> None:
        """Give the root up, so that another writer may own it. Its number stays used.

        Raises:
            StoreError: the store cannot be reached; others wait until this owner counts as dead.
        """
        number, self.number = self.number, 0
        _HERE.pop(self._token, None)
        if number and self._newest() == number:
            self._store.put(_key(number), self._words(0.0))

    def _refuse_alive(self, number: int) -> None:
        found = self._said(number)
        left_s = _left_s(found)
        if left_s <= 0 or found.get("owner") == self._token:
            return
        raise StoreError(
            f"another trainer publishes into {self._store.url}: process {found.get('pid')} on {found.get('host')}",
            expected="one trainer per root",
            state="nothing was changed",
            hint=f"give this trainer its own root, or end the other trainer; if it has already ended, wait "
            f"{left_s:.0f} s or "
            f"remove {self._store.url}/{_FOLDER}/",
        )

    def _said(self, number: int) -> dict[str, Any]:
        """Return what an owner wrote about itself; {} where that is gone or damaged."""
        try:
            found = json.loads(self._store.get(_key(number), at_most=_LARGEST))
        except (FileNotFoundError, IntegrityError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _words(self, alive_s: float) -> bytes:
        words = {
            "owner": self._token,
            "host": socket.gethostname(),
            "machine": _machine(),
            "pid": os.getpid(),
            "began": _began(os.getpid()),
            "until": time.time() + alive_s if alive_s else 0,
        }
        return json.dumps(words).encode()

    def _newest(self) -> int:
        return max(self._numbers(), default=0)

    def _numbers(self) -> list[int]:
        return [int(name) for name in self._store.list(_FOLDER) if name.isdecimal() and len(name) < 19]


def _key(number: int) -> str:
    return f"{_FOLDER}/{number:06d}"


def _left_s(found: dict[str, Any]) -> float:
    """Return the seconds for which an owner still counts as alive; 0 where it is dead, or wrote nothing usable."""
    left_s = seconds_left(found.get("until"))
    if left_s is None or not 0 < left_s <= 2 * OWNED_S:
        return 0.0
    if found.get("machine") == _machine() is not None and isinstance(found.get("pid"), int):
        if found["pid"] == os.getpid() and found.get("began") == _began(os.getpid()):
            alive = found.get("owner") in _HERE
        else:
            alive = found.get("began") is not None and found["began"] == _began(found["pid"])
        return left_s if alive else 0.0
    return left_s


def _machine() -> str | None:
    """Return what names this machine and its space of process numbers; None where the kernel does not tell."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _began(pid: int) -> str | None:
    """Return when a process of this machine began, in the kernel's ticks; None where there is none (any more)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
