"""Look for versions of a chain, in one way for everybody who reads one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import StoreError
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.manifest import RunVersion, version_name

__all__ = ["VISIBLE_S", "looks", "newer", "reach"]

VISIBLE_S = 2.0
"""Seconds that a shared filesystem may take to show a new name."""

_Opened = TypeVar("_Opened")


def looks(within: Deadline) -> Iterator[object]:
    """Yield after short pauses, until the deadline: there may be another version in a store."""
    return within.pauses(shortest_s=0.005, longest_s=0.1)


def newer(
    chain: Chain, open_version: Callable[[int], _Opened], looks: Iterable[object], seen: RunVersion | None = None
) -> _Opened | None:
    """Open the newest version, once it is another one than ``seen``; None where the looks end before.

    In an emptied root the newest version may have a lower number, or the same one of another run.

    Args:
        chain: the versions.
        open_version: opens a version by its number; FileNotFoundError where it was pruned: a newer one is coming.
        looks: yields whenever there may be another version.
        seen: run and number of the version that was read last; the run is "" where nobody knows it.
    """
    for _ in looks:
        run, number = chain.head()
        if number and (seen is None or number != seen[1] or (run != seen[0] and "" not in (run, seen[0]))):
            chain.known.clear()
            with suppress(FileNotFoundError):
                return open_version(number)
    return None


def reach(
    chain: Chain, version: int, open_version: Callable[[int], _Opened], looks: Iterable[object], within: Deadline
) -> _Opened:
    """Open a version that was announced, once it can be seen here.

    Args:
        chain, open_version, looks: as in `newer`.
        version: its number.
        within: ends the looks; `VISIBLE_S` is enough on a filesystem, and 0 seconds where there is no wait.

    Raises:
        StoreError: it did not come, or is not there any more.
        TransportError: another thread ended the wait.
    """
    missing: FileNotFoundError | None = None
    chain.known.clear()
    for _ in looks:
        try:
            chain.version(version)
            return open_version(version)
        except FileNotFoundError as error:
            missing = error
    what = f"{chain.store.url} holds no version {version}"
    if within.stop.is_set():
        raise within.error(what, state="nothing was read") from missing
    raise StoreError(
        f"{what}, and none came within {within.timeout_s:.3g} s" if within.timeout_s else what,
        expected=f"{version_name(version)}; the newest here is {chain.latest()}",
        state="nothing was read",
        hint="send the weights again",
    ) from missing
