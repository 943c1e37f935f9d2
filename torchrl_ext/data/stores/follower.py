"""`Follower` looks for versions of a chain, in one way for everybody who reads one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar, final

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import StoreError
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.manifest import RunVersion, version_name

__all__ = ["VISIBLE_S", "Follower"]

VISIBLE_S = 2.0
"""Seconds that a shared filesystem may take to show a new name."""

_Opened = TypeVar("_Opened")


@final
class Follower:
    """Looks for versions of a chain, and opens them.

    Args:
        chain: the versions.
        looks: yields whenever there may be another version, until a deadline; by default, after short pauses.
    """

    def __init__(self, chain: Chain, looks: Callable[[Deadline], Iterator[object]] | None = None) -> None:
        self.chain = chain
        self._looks = looks or (lambda within: within.pauses(shortest_s=0.005, longest_s=0.1))

    def newer(
        self, open_version: Callable[[int], _Opened], within: Deadline, seen: RunVersion | None = None
    ) -> _Opened | None:
        """Open the newest version, once it is another one than ``seen``; None at the deadline.

        In an emptied root the newest version may have a lower number, or the same one of another run.

        Args:
            open_version: opens a version by its number; FileNotFoundError where it was pruned: a newer one is coming.
            within: ends the wait.
            seen: run and number of the version that was read last; the run is "" where nobody knows it.
        """
        for _ in self._looks(within):
            run, number = self.chain.head()
            if number and (seen is None or number != seen[1] or (run != seen[0] and "" not in (run, seen[0]))):
                self.chain.known.clear()
                with suppress(FileNotFoundError):
                    return open_version(number)
        return None

    def reach(self, version: int, open_version: Callable[[int], _Opened], within: Deadline) -> _Opened:
        """Open a version that was announced, once it can be seen here.

        Args:
            version: its number.
            open_version: as in `newer`.
            within: ends the wait, for which `VISIBLE_S` is enough on a filesystem; 0 seconds where there is none.

        Raises:
            StoreError: it did not come, or is not there any more.
            TransportError: another thread ended the wait.
        """
        missing: FileNotFoundError | None = None
        self.chain.known.clear()
        for _ in self._looks(within):
            try:
                self.chain.version(version)
                return open_version(version)
            except FileNotFoundError as error:
                missing = error
        what = f"{self.chain.store.url} holds no version {version}"
        if within.stop.is_set():
            raise within.error(what, state="nothing was read") from missing
        raise StoreError(
            f"{what}, and none came within {within.timeout_s:.3g} s" if within.timeout_s else what,
            expected=f"{version_name(version)}; the newest here is {self.chain.latest()}",
            state="nothing was read",
            hint="send the weights again",
        ) from missing
