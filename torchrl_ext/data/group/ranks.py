"""`TrainerRanks`: trainer ranks 1, 2, ... follow rank 0 through an update, over the store of torch's group.

An update begins when every rank is there, and one that fails on any rank fails on all. Rank 0 numbers updates, gives
orders in each, and posts how it ended; another rank takes the newest update that it has not followed. Because a store
is not a collective, errors can name each rank that does not answer.

Keys, below ``torchrl_ext/ranks/NAME/``: ``begun`` (the number of updates), and as compressed JSON
``N/order/K`` and ``N/answer/K/RANK``. Those of an update go when the next one has begun.
"""

from __future__ import annotations

import itertools
import logging
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple, TypeAlias, TypeVar, final

import msgspec
import torch

from torchrl_ext.base import errors
from torchrl_ext.base.deadline import Deadline, one_at_a_time
from torchrl_ext.base.errors import ConcurrentUpdateError, NotConnectedError, TransportError, WeightSyncError
from torchrl_ext.base.types import Info
from torchrl_ext.data.weights.gather import Ranks

__all__ = ["RankStep", "RankStore", "Session", "Steps", "TrainerRanks", "drives", "numbered", "torch_group"]

log = logging.getLogger("torchrl_ext")

RankStep: TypeAlias = Callable[[Info], Info | None]
"""A rank's step for an order: takes its arguments and returns the rank's answer; both are JSON-safe."""

Steps: TypeAlias = Mapping[str, RankStep]
"""The steps of a rank by the name of their order."""

_PHASES = 30
"""Number of timeouts for which a rank waits for rank 0: an update has phases, each with its own deadline."""
_SHORTEST_S, _LONGEST_S = 0.002, 0.05
"""Pauses between two looks into the store."""
_BEGIN, _END = "begin", "end"
"""Orders without a step: every rank is there; every rank has run what it was ordered."""
_WHERE = {
    "expected": "update_weights on every trainer rank, by senders that every rank makes in the same order",
    "hint": "check trainer rank 0",
}


_made: Counter[str] = Counter()  # by kind, in this process


class RankStore(NamedTuple):
    """A trainer's ranks: this process's rank, the number of ranks, and the store that they share."""

    rank: int
    size: int
    store: Any


def torch_group() -> RankStore:
    """Return torch's process group, or a group of one rank if there is none."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return RankStore(0, 1, None)
    store = torch.distributed.distributed_c10d._get_default_store()
    return RankStore(torch.distributed.get_rank(), torch.distributed.get_world_size(), store)


def numbered(kind: str) -> str:
    """Return a name that is equal on all ranks that make the same number of calls for ``kind``."""
    _made[kind] += 1
    return f"{kind}/{_made[kind]}"


def drives(rank: int | None) -> bool:
    """Return whether a trainer rank drives updates, as rank 0 does; None stands for torch's."""
    return (torch_group().rank if rank is None else rank) == 0


class _Failure(msgspec.Struct, frozen=True):
    kind: str
    what: str
    parts: dict[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        parts = {}
        if isinstance(error, WeightSyncError):
            parts = {name: getattr(error, name) for name in ("expected", "state", "hint", "code")}
        return cls(type(error).__name__, errors.why(error).encode(errors="replace").decode(), parts)

    def error(self, rank: int) -> WeightSyncError:
        kind = getattr(errors, self.kind) if self.kind in errors.__all__ else TransportError
        made: WeightSyncError = kind(f"trainer rank {rank}: {self.what}", **self.parts)
        return made


class _Order(msgspec.Struct, frozen=True):
    step: str = ""  # empty: the update is over
    args: dict[str, Any] = {}
    version: int | None = None  # in service then
    failure: _Failure | None = None


class _Answer(msgspec.Struct, frozen=True):
    given: dict[str, Any] = {}
    failure: _Failure | None = None  # the first of this rank in this update


Message = TypeVar("Message", bound=msgspec.Struct)


@final
class _Notes:
    """The store below a prefix.

    Messages are compressed: a TCPStore takes 8 MiB, and those of `sharded` list a model's parameters.

    Raises (all methods):
        NotConnectedError: the store is gone.
    """

    def __init__(self, prefix: str, store: Any) -> None:
        self.store, self._prefix = store, prefix

    def begun(self, more: int = 0) -> int:
        """Count ``more`` updates, and return the number of all."""
        return int(self._call("add", f"{self._prefix}begun", more))

    def put(self, key: str, message: msgspec.Struct) -> str:
        """Put a message, and return its key."""
        self._call("set", self._prefix + key, zlib.compress(msgspec.json.encode(message), 1))
        return key

    def there(self, *keys: str) -> bool:
        return bool(self._call("check", [self._prefix + key for key in keys]))

    def read(self, key: str, kind: type[Message]) -> Message:
        return msgspec.json.decode(zlib.decompress(self._call("get", self._prefix + key)), type=kind)

    def remove(self, keys: list[str]) -> None:
        with suppress(RuntimeError):  # some stores remove nothing
            for key in keys:
                self.store.delete_key(self._prefix + key)

    def _call(self, what: str, *args: Any) -> Any:
        try:
            return getattr(self.store, what)(*args)
        except RuntimeError as error:
            raise NotConnectedError(
                f"the store of the trainer's process group is gone: {error}",
                state="this rank does not know how the update ended",
                hint="check trainer rank 0, which usually hosts the store",
            ) from error


@final
class Session(Ranks):
    """One update, through which rank 0 leads the other ranks (`TrainerRanks.leading`).

    In a group of one rank it posts nothing and gets no answers.

    Attributes:
        version: the version in service that the other ranks receive, if the update succeeds; None if it has none.
    """

    def __init__(self, notes: _Notes | None, size: int, timeout_s: float) -> None:
        self.version: int | None = None
        self._notes, self._others, self._timeout_s, self._orders = notes, range(1, size), timeout_s, 0
        self._keys: list[str] = []
        self._prefix = "" if notes is None else f"{notes.begun(1)}/"

    @property
    def alone(self) -> bool:
        return not self._others

    def order(self, step: str, /, **args: Any) -> None:
        """Let every other rank run ``step``, also if this rank fails meanwhile.

        Args:
            step: its name.
            args: JSON-safe arguments.
        """
        self._post(_Order(step, args))

    def _post(self, order: _Order) -> None:
        if self._notes is not None:
            self._orders += 1
            self._keys.append(self._notes.put(f"{self._prefix}order/{self._orders}", order))

    def answers(self, within: Deadline | None = None) -> list[Info]:
        """Return the answers of ranks 1, 2, ... to the last order, in order of rank.

        Args:
            within: for all of them; by default the timeout of these ranks.

        Raises:
            WeightSyncError: a rank failed in this step or before; the error has the class and message of that rank's
                error.
            DeadlineError: ranks, which the message names, did not answer by the deadline.
            TransportError: the stop flag of ``within`` was set.
        """
        if self._notes is None:
            return []
        within = within or Deadline(self._timeout_s)
        keys = {rank: f"{self._prefix}answer/{self._orders}/{rank}" for rank in self._others}
        for _ in within.pauses(shortest_s=_SHORTEST_S, longest_s=_LONGEST_S):
            if self._notes.there(*keys.values()):
                break
        found = {rank: self._notes.read(key, _Answer) for rank, key in keys.items() if self._notes.there(key)}
        for rank, answer in found.items():
            if answer.failure is not None:
                raise answer.failure.error(rank)
        if silent := [str(rank) for rank in keys if rank not in found]:
            who = f"trainer rank{'s' * (len(silent) > 1)} {', '.join(silent)}"
            raise within.error(f"{who} did not answer", expected=_WHERE["expected"], hint=f"check {who}")
        return [answer.given for answer in found.values()]

    def settle(self) -> None:
        """Wait until every rank has run what it was ordered.

        Raises:
            WeightSyncError, DeadlineError: as `answers`.
        """
        self.ask(_END)


@final
class TrainerRanks:
    """The ranks of one trainer: rank 0 leads an update, and the other ranks follow it.

    Every rank needs the same names (`numbered`: create the same objects in the same order) and one call per update,
    from one thread at a time: `leading` on rank 0, `following` on the others. Timeouts, transports, mappers and engines
    may differ or be left out.

    Args:
        name: name of this object, unique in this process.
        timeout_s: seconds that a rank may take to answer; a rank waits 30 times as long for rank 0.
        rank: rank of this process; None takes the group's.
        group: returns the group at the time of a call.
    """

    def __init__(
        self, name: str, timeout_s: float, *, rank: int | None = None, group: Callable[[], RankStore] = torch_group
    ) -> None:
        self._name, self._timeout_s, self._rank, self._group = name, timeout_s, rank, group
        self._busy = threading.Lock()
        self._notes: _Notes | None = None
        self._session: Session | None = None
        self._last = 0  # number of the update that this rank followed last
        self._past: list[str] = []  # keys of updates that this rank led

    @property
    def rank(self) -> int:
        """This process's rank in the trainer; 0 if it is the only process."""
        return self._group().rank if self._rank is None else self._rank

    @property
    def size(self) -> int:
        """The number of the trainer's ranks."""
        return self._group().size

    @property
    def drives(self) -> bool:
        """Whether this rank leads, as rank 0 does."""
        return self.rank == 0

    @property
    def session(self) -> Session:
        """The session that rank 0 leads now; a group of one rank always has a session.

        Raises:
            TransportError: this rank, one of several, leads no update.
        """
        if self._session is None and self.size > 1:
            raise TransportError(
                "this trainer rank leads no update at the moment", expected="update_weights or send_weights"
            )
        return self._session or Session(None, 1, self._timeout_s)

    @contextmanager
    def leading(self) -> Iterator[Session]:
        """Lead the other ranks through an update, on rank 0; they learn once how the block ended.

        They receive `Session.version`, or the error that the block raised.

        Raises:
            ConcurrentUpdateError: another thread leads an update, which continues.
            NotConnectedError: the store is gone; the block did not run.
            DeadlineError: ranks, which the message names, did not come within the timeout; the block did not run.
            WeightSyncError: a rank could not begin; the block did not run.
        """
        with self._one_at_a_time():
            session, failure = Session(self._shared(), self.size, self._timeout_s), None
            try:
                session.ask(_BEGIN)
                if self._notes is not None:  # every rank has left the updates before
                    self._notes.remove(self._past)
                    self._past = []
                self._session = session
                yield session
            except BaseException as error:
                failure = _Failure.of(error)
                raise
            finally:
                self._session = None
                try:
                    session._post(_Order(version=session.version, failure=failure))
                except NotConnectedError:
                    log.warning("the other trainer ranks were not notified of how an update ended", exc_info=True)
                self._past += session._keys

    def following(
        self, steps: Callable[[], Steps], within: Deadline | None = None, *, apart: Sequence[str] = ("gather",)
    ) -> int | None:
        """Follow rank 0 through the newest update that this rank has not followed, on a rank other than 0.

        Args:
            steps: returns this rank's steps by the name of their order. It reads the weights.
            within: ends every wait for rank 0; by default, and at most, each wait lasts 30 timeouts.
            apart: names of the steps that run without a shared group, which has no orders.

        Returns:
            The version in service; None if rank 0 named none, and without a shared group.

        Raises:
            Exception: as ``steps`` raised it; rank 0's update fails with it.
            WeightSyncError: a step failed, or the update on another rank; a TransportError stands for any other error.
            ConcurrentUpdateError: another thread of this process follows.
            DeadlineError: rank 0 began no update, or sent nothing in it, by the deadline.
            NotConnectedError: the store is gone.
        """
        with self._one_at_a_time():
            notes = self._shared()
            if notes is None:
                own = steps()
                for step in apart:
                    own[step]({})
                return None
            return self._follow(notes, steps, within or Deadline(float("inf")))

    def _follow(self, notes: _Notes, steps: Callable[[], Steps], within: Deadline) -> int | None:
        own, answered = dict[str, RankStep](), list[str]()
        failure: Exception | None = None
        try:
            own.update(steps())
        except Exception as error:  # noqa: BLE001 - the answer to rank 0, and raised at the end
            failure = error
        own |= {_BEGIN: dict, _END: dict}
        try:
            self._last = self._wait(within, lambda: self._newer(notes), "trainer rank 0 began no update")
            for number in itertools.count(1):
                key = f"{self._last}/order/{number}"
                self._wait(within, lambda key=key: notes.there(key), "trainer rank 0 gave no order")  # type: ignore[misc]
                order = notes.read(key, _Order)
                if not order.step:
                    break
                answer = _Answer()
                try:
                    answer = _Answer(own[order.step](order.args) or {})
                except Exception as error:  # noqa: BLE001 - as above
                    if failure is None and not isinstance(error, WeightSyncError):
                        failure = TransportError(errors.why(error))
                        failure.__cause__ = error
                    failure = failure or error
                if failure is not None:
                    answer = _Answer(failure=_Failure.of(failure))
                answered.append(notes.put(f"{self._last}/answer/{number}/{self.rank}", answer))
        except WeightSyncError as error:
            if failure is not None:
                raise failure from error
            raise
        finally:
            notes.remove(answered)  # which rank 0 has read, or never will
        if failure is not None:
            raise failure
        if order.failure is not None:
            raise order.failure.error(0)
        return order.version

    def _newer(self, notes: _Notes) -> int:
        """Return the number of the newest update; 0 if this rank has followed it."""
        newest = notes.begun()
        return newest if newest != self._last else 0

    def _wait(self, within: Deadline, ask: Callable[[], Any], what: str) -> Any:
        patience = within.within(_PHASES * self._timeout_s)
        how: dict[str, Any] = {"shortest_s": _SHORTEST_S, "longest_s": _LONGEST_S, **_WHERE}
        return patience.poll(ask, what, **how)

    def _shared(self) -> _Notes | None:
        _, size, store = self._group()
        if size > 1 and (self._notes is None or self._notes.store is not store):
            self._notes = _Notes(f"torchrl_ext/ranks/{self._name}/", store)
            self._last, self._past = 0, []
        return self._notes if size > 1 else None

    def _one_at_a_time(self) -> AbstractContextManager[None]:
        refusal = ConcurrentUpdateError(
            "another thread of this trainer rank is in an update of the same sender",
            state="the other update continues",
            hint="update from one thread, or make a sender for each",
        )
        return one_at_a_time(self._busy, refusal)
