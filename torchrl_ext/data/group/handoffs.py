"""One handoff in a group: how it is announced and acknowledged, and the worker's end that receives it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Protocol

from torch import Tensor

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import NotConnectedError, TransportError, WeightSyncError, why
from torchrl_ext.base.types import Count, Params, Wire
from torchrl_ext.data.group.meeting import LAST_WORDS_S, LOOK_S, Member
from torchrl_ext.data.group.process_group import Group
from torchrl_ext.data.transports.base import Arrival
from torchrl_ext.data.transports.standalone import StandaloneEnd

__all__ = [
    "GroupLoad", "GroupMailbox", "GroupWorker", "acknowledge", "await_workers", "receiving_failed", "sending_failed",
]  # fmt: skip


def acknowledge(group: Group, handoff: int, answer: int | str) -> None:
    """Tell the trainer how many bytes of a handoff came from rank to rank, or why it was refused (worker end)."""
    group.acknowledged = handoff
    group.notes.put(f"{group.generation}/arrived/{handoff}/{group.rank}", answer)


def await_workers(group: Group, handoff: int) -> dict[int, int]:
    """Wait until each worker has taken the handoff, and return the bytes that came to it from rank to rank (trainer).

    Raises:
        DeadlineError: names the workers that say nothing within the group's deadline.
        TransportError: a rank is gone or did not take it, or another thread aborted.
    """
    key = f"{group.generation}/arrived/{handoff}/"
    answers: dict[int, Any] = {}
    within = Deadline(group.timeout_s, stop=group.stop)
    while silent := [rank for rank in group.workers if rank not in answers]:
        if within.stop.is_set() or not group.alive:
            raise TransportError("the transfer was aborted")
        lost = group.reason()
        answers |= group.notes.collect(key, silent, within.within(LOOK_S))
        if failed := [rank for rank, answer in answers.items() if type(answer) is not int]:
            raise TransportError(f"{group.call(failed)} did not take it")
        if silent := [rank for rank in silent if rank not in answers]:
            if lost:
                raise TransportError(f"the group was severed before every worker had answered: {lost}")
            within.check(f"{group.call(silent)} did not confirm that it arrived")
    for done in (key, f"{group.generation}/over/"):
        group.notes.drop(done)
    group.notes.put(f"{group.generation}/over/{handoff}", True)
    return answers


def sending_failed(group: Group, handoff: int, version: int, error: WeightSyncError) -> WeightSyncError:
    """Return the trainer's ``error`` again, with the ranks that are silent and the words of the others."""
    answers, silent = {}, []
    if not group.stop.is_set():
        key = f"{group.generation}/arrived/{handoff}/"
        answers = group.notes.collect(key, group.workers, Deadline(LAST_WORDS_S, stop=group.stop))
        silent = [rank for rank in group.workers if rank not in answers]
    lost = f"; no answer came from {group.call(silent)}" if silent else ""
    words = [f"rank {rank} says: {text}" for rank, text in answers.items() if text and type(text) is str]
    reason = group.reason()
    if reason != why(error) and reason not in error.what:
        words.append(f"the group was severed: {reason}")
    return type(error)(
        f"weights version {version} did not reach {group.call(group.workers)}: {error.what}{lost}",
        expected=error.expected,
        state="; ".join([*words, "workers may hold a part of it, and the group is closed"]),
        hint="connect again (init_all_workers_group, or the next update_weights) when every worker is up",
    )


def receiving_failed(group: Group, handoff: int, version: int, error: WeightSyncError) -> WeightSyncError:
    """Tell the trainer of the worker's ``error``, and return it again with the words of the trainer."""
    try:
        group.notes.patience_s = LAST_WORDS_S
        acknowledge(group, handoff, why(error))
        trainer = group.reason(LAST_WORDS_S) or "it reports no failure, so the network or another worker failed"
    except NotConnectedError:
        trainer = "its notes are gone, so it ended or was shut down"
    group.sever(f"{group.call([group.rank])} failed: {why(error)}")
    return type(error)(
        f"rank {group.rank} lost weights version {version} on its way from the trainer, "
        f"{group.call([0])}: {error.what}",
        expected=error.expected,
        state=f"of the trainer: {trainer}. This rank may hold a part of the version, and its group is closed",
        hint="connect again when the trainer does",
    )


def _give_up(group: Group, handoff: int, words: str) -> None:
    """Tell the trainer why this worker takes no more of a handoff, and sever the group."""
    if group.alive:  # else the interpreter may be ending, which closes iterators left half-way
        group.notes.patience_s = LAST_WORDS_S
        with suppress(WeightSyncError):  # the trainer is gone
            acknowledge(group, handoff, words)
        group.sever(f"{group.call([group.rank])} failed: {words}")


class _Announcement(Wire, frozen=True, kw_only=True):
    """A version that comes next, beside the info of its handoff; without ``params`` it has those of the one before."""

    version: Count
    params: Params | None = None


class GroupMailbox:
    """Announces versions in the notes of a group.

    Args:
        member: of the group.
    """

    def __init__(self, member: Member) -> None:
        self.member: Any = member  # of the class that a subclass needs

    def announce(self, arrival: Arrival, within: Deadline) -> None:
        """Announce a version; the announcement before is removed, since its readers have read it."""
        self.member.under(within)
        group = self.member.carrier()
        params = None if arrival.params == group.params else arrival.params  # a model's parameters rarely change
        announcement = _Announcement(version=arrival.version, params=params)
        group.notes.put(_key(group, group.announced + 1), {**arrival.info, **announcement.to_json()})
        group.notes.drop(_key(group, group.announced))
        group.announced, group.params = group.announced + 1, arrival.params

    def next(self, within: Deadline, received: Arrival | None = None) -> Arrival | None:
        """Return the next announcement, or None at the deadline.

        Raises:
            NotConnectedError: there is no group, or the trainer ended it or is gone.
            ConfigError: the announcement is malformed; the trainer hears of it.
        """
        self.member.under(within)
        group = self.member.carrier()
        try:
            while not (found := group.notes.wait(_key(group, group.announced + 1), within.within(LOOK_S))):
                reason = "this rank aborted" if within.stop.is_set() else group.reason()
                if reason or not group.intact:
                    raise NotConnectedError(
                        f"rank {group.rank} is no longer connected to the trainer, {group.call([0])}: {reason}",
                        hint="connect again when the trainer does",
                    )
                if within.over:
                    return None
        except NotConnectedError:
            group.sever()
            raise
        with _reading(group):
            note = _Announcement.from_json(found[0], f"an announcement of the trainer, {group.call([0])},")
        group.announced += 1
        group.params = group.params if note.params is None else note.params
        info = {name: value for name, value in found[0].items() if name not in ("version", "params")}
        return Arrival(version=note.version, params=group.params, info=info)


def _key(group: Group, number: int) -> str:
    return f"{group.generation}/announced/{number}"


@contextmanager
def _reading(group: Group) -> Iterator[None]:
    """Sever the group where a worker cannot read what the trainer says, which waits for it and so hears why."""
    try:
        yield
    except BaseException as error:
        group.notes.patience_s = LAST_WORDS_S
        group.explain(f"{group.call([group.rank])} could not read a handoff: {why(error)}")
        group.sever()
        raise


class GroupLoad(Wire, frozen=True, kw_only=True):
    """One handoff; a transport adds what its workers need to receive it.

    Attributes:
        group: names the group through which it comes.
        handoff: its number in the group.
    """

    group: str
    handoff: Count


class _Incoming(Protocol):
    def pairs(self) -> Iterator[tuple[str, Tensor]]: ...


class GroupWorker(GroupMailbox, StandaloneEnd):
    """A worker's end in a group: it takes each handoff, or tells the trainer why not and ends the group.

    A subclass says what arrives, in `incoming`.
    """

    load: ClassVar[type[GroupLoad]]
    """Of each handoff."""

    @abstractmethod
    def incoming(self, group: Any, load: Any, arrival: Arrival, into: Mapping[str, Tensor]) -> _Incoming:
        """Return the receiver of one handoff.

        Args:
            group: of this worker.
            load: of class `load`.
            arrival, into: as for `LandingEnd.receive`.

        Returns:
            An object whose ``pairs()`` are those of `LandingEnd.receive`.
        """

    def receive(self, arrival: Arrival, into: Mapping[str, Tensor], within: Deadline) -> Iterator[tuple[str, Tensor]]:
        self.member.under(within)
        pairs = self._receiving(arrival, *self._begin(arrival, into))
        next(pairs)  # from here on the trainer hears of a loader that asks for nothing, too
        return pairs

    def _begin(self, arrival: Arrival, into: Mapping[str, Tensor]) -> tuple[Group, GroupLoad, _Incoming]:
        group = self.member.carrier()
        with _reading(group):
            load = self.load.from_json(arrival.info, f"the handoff of weights version {arrival.version}")
            if load.group != group.generation:
                raise NotConnectedError(
                    f"the trainer sends through group {load.group}, rank {group.rank} is in group {group.generation}",
                    hint="connect again",
                )
            return group, load, self.incoming(group, load, arrival, into)

    def _receiving(self, arrival: Arrival, group: Group, load: GroupLoad, incoming: _Incoming) -> Iterator[Any]:
        """Yield None once the handoff has begun, and then its pairs."""
        name, before = None, group.received.total()
        try:
            yield None
            for name, tensor in incoming.pairs():
                yield name, tensor
            acknowledge(group, load.handoff, group.received.total() - before)  # the loader has taken the last one, too
        except WeightSyncError as error:
            raise receiving_failed(group, load.handoff, arrival.version, error) from error
        except BaseException as error:
            stopped = "it loaded nothing" if name is None else f"it stopped loading after {name!r}"
            _give_up(group, load.handoff, stopped if type(error) is GeneratorExit else why(error))
            raise

    def refuse(self, arrival: Arrival, error: BaseException) -> None:
        group, load, _ = self._begin(arrival, {})
        _give_up(group, load.handoff, why(error))

    def check_connection(self) -> bool:
        return self.member.connected

    def close(self) -> None:
        self.member.close()
