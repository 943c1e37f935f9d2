"""`TrainerRanks`: what rank 0 of a trainer asks of its other ranks in an update, and what they answer.

Both go through the store of torch's process group, which is no collective: each rank is named that does not answer. A
value of torch's TCPStore is 8 MiB at most, so longer ones go in several; and what was read is removed, since the store
would keep it for as long as the trainer lives.

Every update has a number, under which all of its orders and answers are: a rank that fails before it follows counts the
update too (`TrainerRanks.dismiss`), so that no rank ever follows the orders of an update that is over.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from torchrl_ext import errors
from torchrl_ext.deadline import wait_until
from torchrl_ext.errors import (
    ConcurrentUpdateError,
    DeadlineError,
    NotConnectedError,
    TransportError,
    WeightSyncError,
    why,
)
from torchrl_ext.types import Info

__all__ = ["TrainerRanks", "drives", "shared_store", "store_gone"]

log = logging.getLogger("torchrl_ext")

_SHORTEST_S, _LONGEST_S = 0.001, 0.01  # between two looks
_PHASES = 30
"""For how many timeouts a rank waits for the next order of rank 0: an update has phases, each with its own deadline."""
_OVER = "over"
_MOST_CHARACTERS = 4 << 20  # of one value

_made: Counter[str] = Counter()  # by name, in this process


class TrainerRanks:
    """The ranks of one trainer: rank 0 gives orders, the others follow them until it says that the update is over.

    Transports of one name are matched across ranks by the order in which each process made them.

    Args:
        name: of the transport.
        timeout_s: how long a rank may take for an answer, in seconds.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name, self._timeout_s = f"torchrl_ext/ranks/{name}/{_made[name]}", timeout_s
        _made[name] += 1
        self._update, self._orders = 1, 0  # the number of the update that runs or comes next; orders given in it
        self._began = 0.0
        self._serving = threading.Lock()
        self._given: list[tuple[str, int]] = []  # keys of orders, and how many values each took

    @property
    def rank(self) -> int:
        """This process's rank in the trainer; 0 where it is the only one."""
        return torch.distributed.get_rank() if _grouped() else 0

    @property
    def size(self) -> int:
        """The number of the trainer's ranks."""
        return torch.distributed.get_world_size() if _grouped() else 1

    # rank 0

    def order(self, what: str, **more: Any) -> None:
        """Tell every other rank to do ``what``, with JSON-safe arguments."""
        self._orders += 1
        if self._orders == 1:
            self._began = time.monotonic()
        if self.size > 1:
            self._give(f"order/{self._orders}", {"do": what, **more})

    def answers(self, timeout_s: float | None = None) -> list[Info]:
        """Return what ranks 1, 2, ... answer to the last order, in this order.

        Args:
            timeout_s: how long each may take, in seconds; by default that of these ranks.

        Raises:
            DeadlineError: names the ranks that do not answer within the deadline.
            WeightSyncError: a rank could not do it, in its words; the kind of error that it met.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        found = [self._wait(f"answer/{self._orders}/{rank}", rank, timeout_s) for rank in range(1, self.size)]
        for key, count in self._given if found else ():  # all ranks have read these
            self._remove(key, count)
        self._given = []
        for rank, answer in enumerate(found, 1):
            if "error" in answer:
                kind = getattr(errors, str(answer.get("kind")), TransportError)
                raise kind(f"trainer rank {rank}: {answer['error']}", state=answer.get("state"))
        return found

    def ask(self, what: str, **more: Any) -> list[Info]:
        """Give an order, and return the `answers` to it."""
        self.order(what, **more)
        return self.answers()

    def dismiss(self, error: BaseException | None = None) -> None:
        """End an update: on rank 0 once in every update, which lets the other ranks go; on them where one fails before
        it follows.

        Args:
            error: what it failed with on this rank; the others raise it as well.
        """
        words = {} if error is None else {"error": why(error), "kind": type(error).__name__}
        try:
            if self.rank == 0:
                waited = self._orders > 0 and time.monotonic() - self._began >= self._timeout_s
                self.order(_OVER, waited=waited, **words)
                if self.size > 1:
                    self._give("over", {"do": _OVER, "waited": waited, **words})
            elif words:
                self._put(f"answer/1/{self.rank}", words)
        except WeightSyncError:
            log.warning("the other trainer ranks could not be told that an update is over", exc_info=True)
        self._update, self._orders = self._update + 1, 0

    # the other ranks

    def serve(self, steps: Mapping[str, Callable[[Info], Info | None]]) -> None:
        """Follow orders until rank 0 says that the update is over.

        Args:
            steps: what is done for each order; it takes the order, and returns what is answered.

        Raises:
            ConcurrentUpdateError: another thread of this process follows them.
            WeightSyncError: rank 0 failed, or is gone; or a step failed here.
        """
        if not self._serving.acquire(blocking=False):
            raise ConcurrentUpdateError(
                "this trainer rank takes part in another update through the same transport",
                state="that one goes on",
                hint="update from one thread, or give each sender a transport of its own",
            )
        try:
            self._serve(steps)
        finally:
            self._update, self._orders = self._update + 1, 0
            self._serving.release()

    def _serve(self, steps: Mapping[str, Callable[[Info], Info | None]]) -> None:
        failure: WeightSyncError | None = None
        order = self._first()
        while order["do"] != _OVER:
            self._orders += 1
            try:
                answer = steps[order["do"]](order) or {}
            except Exception as error:  # noqa: BLE001 - carried over to rank 0, and raised here at the end
                failure = error if isinstance(error, WeightSyncError) else TransportError(why(error))
                failure.__cause__ = error
                answer = {"error": why(error), "kind": type(error).__name__}
            self._put(f"answer/{self._orders}/{self.rank}", answer)
            order = self._wait(f"order/{self._orders + 1}", 0, _PHASES * self._timeout_s)
        if failure is not None:
            raise failure
        if "error" in order:
            kind = getattr(errors, str(order.get("kind")), TransportError)
            raise kind(f"trainer rank 0: {order['error']}", state="this rank took no part in what followed")

    def _first(self) -> Info:
        """Wait for the first order of this update; where it is over already, return that order.

        Rank 0 may have waited for this rank in vain: this call is then the next update's, if rank 0 begins one soon.
        """
        over: Info | None = None
        while True:
            try:
                order = self._wait("order/1", 0, _PHASES * self._timeout_s if over is None else self._timeout_s)
            except DeadlineError:
                if over is None:
                    raise
                self._update -= 1
                return over
            if not self._there("over"):
                return order
            over = self._wait("over", 0, self._timeout_s)
            if not over["waited"]:
                return over
            self._update += 1

    # both

    def _store(self) -> Any:
        return torch.distributed.distributed_c10d._get_default_store()

    def _key(self, key: str) -> str:
        return f"{self._name}/{self._update}/{key}"

    def _give(self, key: str, value: Info) -> None:
        self._given.append((self._key(key), self._put(key, value)))

    def _put(self, key: str, value: Info) -> int:
        """Put what others wait for, and return how many values of the store it took."""
        key, text = self._key(key), json.dumps(value, separators=(",", ":"))
        parts = [text[at : at + _MOST_CHARACTERS] for at in range(0, len(text), _MOST_CHARACTERS)]
        try:
            for number, part in enumerate(parts[1:], 1):
                self._store().set(f"{key}/{number}", part)
            self._store().set(key, f"{len(parts)} {parts[0]}")  # last, as it is what readers look for
        except RuntimeError as error:
            raise store_gone(error) from error
        return len(parts)

    def _wait(self, key: str, rank: int, timeout_s: float) -> Info:
        key, store = self._key(key), self._store()
        try:
            wait_until(
                lambda: store.check([key]),
                timeout_s,
                lambda: DeadlineError(
                    f"trainer rank {rank} said nothing within {timeout_s:g} s",
                    expected="update_weights on every trainer rank, the same number of times",
                    hint=f"look at trainer rank {rank}; make the same transports in the same order on every rank",
                ),
                shortest_s=_SHORTEST_S,
                longest_s=_LONGEST_S,
            )
            count, _, text = store.get(key).decode().partition(" ")
            text += "".join(store.get(f"{key}/{number}").decode() for number in range(1, int(count)))
            if rank:  # rank 0 alone reads answers, and orders are for all
                self._remove(key, int(count))
            found = json.loads(text)
        except DeadlineError:
            raise
        except RuntimeError as error:
            raise store_gone(error) from error
        return dict(found)

    def _there(self, key: str) -> bool:
        try:
            return bool(self._store().check([self._key(key)]))
        except RuntimeError as error:
            raise store_gone(error) from error

    def _remove(self, key: str, count: int) -> None:
        with suppress(RuntimeError):  # some stores remove nothing
            for part in (key, *(f"{key}/{number}" for number in range(1, count))):
                self._store().delete_key(part)


def drives(rank: int | None) -> bool:
    """Return whether a trainer rank drives updates, as rank 0 does; None stands for torch's, 0 without a group."""
    return (torch.distributed.get_rank() if rank is None and _grouped() else rank or 0) == 0


def shared_store() -> Any | None:
    """Return the store of torch's process group; None where this process is the only rank."""
    shared = _grouped() and torch.distributed.get_world_size() > 1
    return torch.distributed.distributed_c10d._get_default_store() if shared else None


def store_gone(error: Exception) -> NotConnectedError:
    """Return the error to raise where the store of torch's process group failed with ``error``."""
    return NotConnectedError(
        f"the store of the trainer's process group is gone: {error}",
        state="this rank does not know what became of the update",
        hint="look at trainer rank 0, which keeps it as a rule",
    )


def _grouped() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
