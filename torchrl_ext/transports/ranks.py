"""`TrainerRanks`: trainer ranks 1, 2, ... follow rank 0 through an update, over the store of torch's group.

Every update is a session with a random id. Rank 0 posts it before anything can fail, gives orders in it, and posts how
it ended; another rank takes the newest session that it has not followed. After a failed session, rank 0 waits until the
others have left it, for at most one timeout. So a rank that failed, was late or missed an update joins the next one.
Because a store is not a collective, errors can name each rank that does not answer.

Keys, below ``torchrl_ext/ranks/NAME/``: ``newest`` (an id), ``after/ID`` (there is a newer session than ID),
``ID/left/RANK``, and as JSON ``ID/order/N``, ``ID/answer/N/RANK``, ``ID/over``. Those of a session go with the next but
one.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias, TypeVar, final

import msgspec
import torch

from torchrl_ext import errors
from torchrl_ext.deadline import Deadline, in_thread, one_at_a_time
from torchrl_ext.errors import ConcurrentUpdateError, DeadlineError, NotConnectedError, TransportError, WeightSyncError
from torchrl_ext.types import Info, described

__all__ = ["Ended", "Group", "RankStep", "Session", "Steps", "TrainerRanks", "drives", "numbered", "torch_group"]

log = logging.getLogger("torchrl_ext")

RankStep: TypeAlias = Callable[[Info], Info | None]
"""A rank's step for an order: takes its arguments and returns the rank's answer; both are JSON-safe."""

Steps: TypeAlias = Mapping[str, RankStep]
"""The steps of a rank by the name of their order."""

_PHASES = 30
"""Number of timeouts for which a rank waits for rank 0: an update has phases, each with its own deadline."""
_STOP_S = 0.05  # in which a stop flag is seen
_LEAST_S = 0.002  # of a wait; less than a millisecond is none, and lasts for ever
_MOST_BYTES = 4 << 20  # of one value; a TCPStore takes 8 MiB
_WHERE = {
    "expected": "update_weights on every trainer rank, by senders that every rank makes in the same order",
    "hint": "check trainer rank 0",
}

_made: Counter[str] = Counter()  # by kind, in this process


class Group(NamedTuple):
    """A trainer's ranks: this process's rank, the number of ranks, and the store that they share."""

    rank: int
    size: int
    store: Any


def torch_group() -> Group:
    """Return torch's process group, or a group of one rank if there is none."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return Group(0, 1, None)
    store = torch.distributed.distributed_c10d._get_default_store()
    return Group(torch.distributed.get_rank(), torch.distributed.get_world_size(), store)


def numbered(kind: str) -> str:
    """Return a name that is equal on all ranks that make the same number of calls for ``kind``."""
    _made[kind] += 1
    return f"{kind}/{_made[kind]}"


def drives(rank: int | None) -> bool:
    """Return whether a trainer rank drives updates, as rank 0 does; None stands for torch's."""
    return (torch_group().rank if rank is None else rank) == 0


class Ended(NamedTuple):
    """How rank 0 ended an update, as reported to another rank.

    Attributes:
        version: the version in service; None without a shared group.
        accepted: number of updates that were accepted since `TrainerRanks.following` last returned.
        error: the error of the update on rank 0, or None.
    """

    version: int | None
    accepted: int
    error: WeightSyncError | None = None


class _Failure(msgspec.Struct, frozen=True):
    kind: str
    what: str
    parts: dict[str, str | None]

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        parts = {}
        if isinstance(error, WeightSyncError):
            parts = {"expected": error.expected, "state": error.state, "hint": error.hint}
        return cls(type(error).__name__, errors.why(error).encode(errors="replace").decode(), parts)

    def error(self, rank: int) -> WeightSyncError:
        kind = getattr(errors, self.kind) if self.kind in errors.__all__ else TransportError
        made: WeightSyncError = kind(f"trainer rank {rank}: {self.what}", **self.parts)
        return made


class _Order(msgspec.Struct, frozen=True):
    step: str = ""  # empty: the session is over
    args: dict[str, Any] = {}
    always: bool = False


class _Answer(msgspec.Struct, frozen=True):
    given: dict[str, Any] = {}
    failure: _Failure | None = None


class _Over(msgspec.Struct, frozen=True):
    version: int
    accepted: int  # updates since rank 0 began
    failure: _Failure | None
    missed: tuple[int, ...]  # ranks for which rank 0 waited in vain


Message = TypeVar("Message", bound=msgspec.Struct)


@final
class _Notes:
    """The store below a prefix, with values of any length and waits that another thread can end.

    Raises (all methods):
        NotConnectedError: the store is gone.
    """

    def __init__(self, prefix: str, store: Any, slice_s: float) -> None:
        self.store, self._prefix, self._slice_s = store, prefix, slice_s
        self._clone: Any = None  # a wait holds the lock of the client that it is made on

    def put(self, key: str, value: bytes | msgspec.Struct) -> list[str]:
        """Put a value, and return the keys that it took."""
        text = value if isinstance(value, bytes) else msgspec.json.encode(value)
        pieces = [text[at : at + _MOST_BYTES] for at in range(0, max(1, len(text)), _MOST_BYTES)]
        keys = [key, *(f"{key}/{number}" for number in range(1, len(pieces)))]
        pieces[0] = b"%d %s" % (len(pieces), pieces[0])
        for each, piece in reversed(list(zip(keys, pieces, strict=True))):  # readers look for the first one
            self._call("set", self._prefix + each, piece)
        return keys

    def there(self, *keys: str) -> bool:
        return bool(self._call("check", [self._prefix + key for key in keys]))

    def get(self, key: str) -> bytes:
        key = self._prefix + key
        count, _, text = self._call("get", key).partition(b" ")
        return b"".join([text, *(self._call("get", f"{key}/{number}") for number in range(1, int(count)))])

    def read(self, key: str, kind: type[Message]) -> Message:
        return msgspec.json.decode(self.get(key), type=described(kind))

    def newest(self) -> str:
        """Return the id of the newest session; empty before the first."""
        return self.get("newest").decode() if self.there("newest") else ""

    def remove(self, keys: list[str]) -> None:
        with suppress(RuntimeError):  # some stores remove nothing
            for key in keys:
                self.store.delete_key(self._prefix + key)

    def looks(self, within: Deadline, *keys: str) -> Iterator[None]:
        """Yield at once, and then when all ``keys`` have come or a slice has passed, until ``within`` is over."""
        yield
        while not within.over:
            self._sleep(within, [self._prefix + key for key in keys])
            yield

    def _sleep(self, within: Deadline, keys: list[str]) -> None:
        if self._clone is None:
            try:
                self._clone = self.store.clone()
            except (AttributeError, RuntimeError):  # of an older torch, or one that cannot be cloned
                self._clone = self.store
        # In a thread, as torch's wait takes no stop flag and no Ctrl-C; in long slices, as it logs each that passes.
        client, span = self._clone, timedelta(seconds=max(_LEAST_S, min(self._slice_s, within.left_s)))
        job = in_thread(lambda: client.wait(keys, span), "torchrl-ext-trainer-ranks")
        while not job.done() and not within.stop.is_set():
            wait([job], _STOP_S)
        if not job.done():
            self._clone = None  # that one is busy for the rest of its slice

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
class Session:
    """One update, through which rank 0 leads the other ranks (`TrainerRanks.leading`).

    In a group of one rank it posts nothing and gets no answers.
    """

    def __init__(self, notes: _Notes | None, size: int, timeout_s: float) -> None:
        self.id, self._notes, self._others, self._timeout_s = uuid.uuid4().hex, notes, range(1, size), timeout_s
        self._orders, self._began, self._late = 0, time.monotonic(), False
        self._keys: list[str] = []
        self._ended: tuple[int | None, bool] = None, False
        self._leaving: list[str] = []  # keys by which others sign that they have left it, where it failed

    def order(self, step: str, /, *, always: bool = False, **args: Any) -> None:
        """Let every other rank run ``step``.

        Args:
            step: its name.
            always: a rank that comes after the session ended runs it too: other ranks meet it there, as in a gather.
            args: JSON-safe arguments.
        """
        if self._notes is not None:
            self._began = self._began if self._orders else time.monotonic()
            self._orders += 1
            self._keys += self._notes.put(f"{self.id}/order/{self._orders}", _Order(step, args, always))

    def answers(self, within: Deadline | None = None) -> list[Info]:
        """Return the answers of ranks 1, 2, ... to the last order, in order of rank.

        Args:
            within: for all of them; by default the timeout of these ranks.

        Raises:
            WeightSyncError: a rank failed in a step or before; the error has the class and message of that rank's
                error.
            DeadlineError: ranks, which the message names, did not answer by the deadline.
            TransportError: the stop flag of ``within`` was set.
        """
        if self._notes is None or not self._orders:
            return []
        within = within or Deadline(self._timeout_s)
        keys = {rank: f"{self.id}/answer/{self._orders}/{rank}" for rank in self._others}
        for _ in self._notes.looks(within, *keys.values()):
            if self._notes.there(*keys.values()):
                break
        found = {rank: self._notes.read(key, _Answer) for rank, key in keys.items() if self._notes.there(key)}
        for rank, answer in found.items():
            if answer.failure is not None:
                raise answer.failure.error(rank)
        if silent := [str(rank) for rank in keys if rank not in found]:
            self._late = not within.stop.is_set()
            who = f"trainer rank{'s' * (len(silent) > 1)} {', '.join(silent)}"
            raise within.error(f"{who} did not answer", expected=_WHERE["expected"], hint=f"check {who}")
        return [answer.given for answer in found.values()]

    def ask(self, step: str, /, **args: Any) -> list[Info]:
        """Give an order, and return the `answers` to it."""
        self.order(step, **args)
        return self.answers()

    def end(self, version: int, accepted: bool) -> None:
        """Set the version in service that the other ranks receive, and whether this update put it in service."""
        self._ended = version, accepted

    def _over(self, version: int, accepted: int, error: BaseException | None) -> None:
        """Post how it ended, with the ranks for which this one waited in vain: they answered nothing."""
        if self._notes is None:
            return
        missed: tuple[int, ...] = ()
        if self._orders and (self._late or (error is not None and time.monotonic() - self._began >= self._timeout_s)):
            answers = {rank: f"{self.id}/answer/1/{rank}" for rank in self._others}
            missed = tuple(rank for rank, key in answers.items() if not self._notes.there(key))
        if error is not None:
            self._leaving = [f"{self.id}/left/{rank}" for rank in self._others if rank not in missed]
        over = _Over(version, accepted, None if error is None else _Failure.of(error), missed)
        self._keys += self._notes.put(f"{self.id}/over", over)
        self._keys += self._notes.put(f"{self.id}/order/{self._orders + 1}", _Order())

    def _await_left(self) -> None:
        """Wait until the other ranks have left this session, if it failed: some may still be on their way to it.

        One that came when the next session has begun would follow that one with what it had for this one.
        """
        self._keys += self._leaving
        if self._notes is not None and self._leaving:
            for _ in self._notes.looks(Deadline(self._timeout_s), *self._leaving):
                if self._notes.there(*self._leaving):
                    break


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
        self, name: str, timeout_s: float, *, rank: int | None = None, group: Callable[[], Group] = torch_group
    ) -> None:
        self._name, self._timeout_s, self._rank, self._group = name, timeout_s, rank, group
        self._busy = threading.Lock()
        self._notes: _Notes | None = None
        self._session: Session | None = None
        self._before: Session | None = None  # the one that this rank led last
        self._last = ""  # id of the session that this rank led or followed last
        self._past: deque[list[str]] = deque()  # keys, by session
        self._version = self._accepted = 0

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
            TransportError: this rank, one of several, leads no session.
        """
        if self._session is None and self.size > 1:
            raise TransportError(
                "this trainer rank leads no update at the moment", expected="update_weights or send_weights"
            )
        return self._session or Session(None, 1, self._timeout_s)

    @contextmanager
    def leading(self) -> Iterator[Session]:
        """Lead the other ranks through an update, on rank 0; they learn once how the block ended.

        They receive the version of the last `Session.end`, and the error that the block raised.

        Raises:
            ConcurrentUpdateError: another thread leads an update, which continues.
            NotConnectedError: the store is gone; the block did not run.

        If the last update failed, wait for the ranks that have not received its end, for at most one timeout.
        """
        with self._one_at_a_time():
            notes, failure = self._shared(), None
            session = self._session = Session(notes, self.size, self._timeout_s)
            try:
                if notes is not None:
                    self._post(notes, session)
                yield session
            except BaseException as error:
                failure = error
                raise
            finally:
                self._session = None
                version, accepted = session._ended
                self._version, self._accepted = self._version if version is None else version, self._accepted + accepted
                try:
                    session._over(self._version, self._accepted, failure)
                except NotConnectedError:
                    log.warning("the other trainer ranks were not notified of how an update ended", exc_info=True)

    def _post(self, notes: _Notes, session: Session) -> None:
        if self._before is not None:
            self._before._await_left()
        self._before = session
        while len(self._past) > 1:  # other ranks may be in the session before this one
            notes.remove(self._past.popleft())
        self._past.append(session._keys)
        notes.put("newest", session.id.encode())
        session._keys += notes.put(f"after/{self._last}", b"")
        self._last = session.id

    def following(
        self,
        steps: Callable[[], Mapping[str, RankStep]],
        within: Deadline | None = None,
        *,
        apart: Sequence[str] = ("gather",),
    ) -> Ended:
        """Follow rank 0 through the newest session that this rank has not followed, on a rank other than 0.

        Args:
            steps: returns this rank's steps by the name of their order. It reads the weights; an error that it or a
                step raises is sent to rank 0, and raised here after the session.
            within: ends every wait for rank 0; by default, and at most, each wait lasts 30 timeouts.
            apart: names of the steps that run without a shared group, which has no orders.

        Returns:
            How rank 0 ended the session, even with an error. Without a shared group the update counts as accepted.

        Raises:
            ConcurrentUpdateError: another thread of this process follows.
            DeadlineError: rank 0 began no session, or sent nothing in it, by the deadline.
            NotConnectedError: the store is gone.
        """
        with self._one_at_a_time():
            own, notes = _Own(steps), self._shared()
            if notes is None:
                for step in apart:
                    own.answer(_Order(step))
                own.require()
                return Ended(None, 1)
            try:
                over = self._follow(notes, own, within or Deadline(float("inf")))
            except WeightSyncError as error:
                own.require(error)
                raise
            own.require()
            news, self._accepted = over.accepted - self._accepted, over.accepted
            return Ended(over.version, news, None if over.failure is None else over.failure.error(0))

    def _follow(self, notes: _Notes, own: _Own, within: Deadline) -> _Over:
        """Follow the newest session; where rank 0 waited in vain for this rank, rather one that begins soon."""
        missed: _Over | None = None
        while True:
            try:
                self._last = self._newest(notes, self._patience(within, 1 if missed else _PHASES))
            except DeadlineError:
                if missed is None:
                    raise
                return missed
            over = f"{self._last}/over"
            if notes.there(over) and self.rank in (ended := notes.read(over, _Over)).missed:
                missed = ended
            elif self._run(notes, self._last, own, within):
                ended = notes.read(over, _Over)
                if ended.failure is not None:  # rank 0 may wait for this one
                    notes.put(f"{self._last}/left/{self.rank}", b"")
                return ended

    def _newest(self, notes: _Notes, within: Deadline) -> str:
        """Wait for a session that this rank has not followed, and return its id."""
        for _ in notes.looks(within, f"after/{self._last}"):
            if (newest := notes.newest()) not in ("", self._last):
                return newest
        raise within.error("trainer rank 0 began no update", **_WHERE)

    def _run(self, notes: _Notes, session: str, own: _Own, within: Deadline) -> bool:
        """Run the orders of a session until it is over; return False where a newer one has replaced it before."""
        answered: list[str] = []
        try:
            for number in itertools.count(1):
                key, patience = f"{session}/order/{number}", self._patience(within, _PHASES)
                for _ in notes.looks(patience, key):
                    if notes.there(key):
                        break
                    if notes.newest() != session and not notes.there(key):  # it may have come between the two looks
                        return False
                else:
                    raise patience.error("trainer rank 0 gave no order", **_WHERE)
                order, over = notes.read(key, _Order), notes.there(f"{session}/over")
                if not order.step:
                    break
                if not over:
                    answered += notes.put(f"{session}/answer/{number}/{self.rank}", own.answer(order))
                elif order.always:
                    own.answer(order)
            return True
        finally:
            notes.remove(answered)  # which rank 0 has read, or never will

    def _patience(self, within: Deadline, timeouts: int) -> Deadline:
        return within.within(timeouts * self._timeout_s)

    def _shared(self) -> _Notes | None:
        _, size, store = self._group()
        if size > 1 and (self._notes is None or self._notes.store is not store):
            self._notes = _Notes(f"torchrl_ext/ranks/{self._name}/", store, self._timeout_s / 2)
            self._last, self._before = "", None
        return self._notes if size > 1 else None

    def _one_at_a_time(self) -> AbstractContextManager[None]:
        refusal = ConcurrentUpdateError(
            "another thread of this trainer rank is in an update of the same sender",
            state="the other update continues",
            hint="update from one thread, or make a sender for each",
        )
        return one_at_a_time(self._busy, refusal)


@final
class _Own:
    """The steps of this rank, and its first failure."""

    def __init__(self, make: Callable[[], Mapping[str, RankStep]]) -> None:
        self._failure: Exception | None = None
        self._steps: Mapping[str, RankStep] | None = None
        try:
            self._steps = make()
        except Exception as error:  # noqa: BLE001 - the answer to rank 0, and raised at the end
            self._failure = error

    def answer(self, order: _Order) -> bytes:
        """Run an order, and return the answer to it."""
        error = self._failure
        if self._steps is not None:
            try:
                return msgspec.json.encode(_Answer(self._steps[order.step](order.args) or {}))
            except Exception as met:  # noqa: BLE001 - as above
                error = met
                self._failure = self._failure or met
        assert error is not None
        return msgspec.json.encode(_Answer(failure=_Failure.of(error)))

    def require(self, cause: Exception | None = None) -> None:
        """Raise the failure, if there is one."""
        if isinstance(self._failure, WeightSyncError) or (self._steps is None and self._failure is not None):
            raise self._failure from self._failure.__cause__ or cause
        if self._failure is not None:
            raise TransportError(errors.why(self._failure)) from self._failure
