"""A group of ranks: the store of their connection, a carrier that moves their bytes, and a deadline for every wait.

A group lives as long as its connection. The first failure ends it for every rank, with its reason; the next connection
has a store and a group of its own.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Protocol, TypeVar, cast, final

import torch
from torch import Tensor

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import (
    ConfigError,
    DeadlineError,
    ManifestError,
    NotConnectedError,
    TransportError,
    WeightSyncError,
    why,
)
from torchrl_ext.base.types import Count, ParamMeta, Params, Port, Seconds, Text, Wire, is_loopback
from torchrl_ext.data.group.backends import carrier_of, choose_backend
from torchrl_ext.data.group.calls import brief, sever_at_exit
from torchrl_ext.data.group.carrier import Carrier, Move, Seat
from torchrl_ext.data.group.store import LOST, HostedStore, KeyStore, RemoteStore
from torchrl_ext.data.transports.base import Arrival, Worker
from torchrl_ext.data.transports.standalone import StandaloneEnd

__all__ = ["Group", "GroupLoad", "GroupOffer", "GroupWorker", "Member", "ranks_text"]

log = logging.getLogger("torchrl_ext")

Store = TypeVar("Store", bound=KeyStore)

LAST_WORDS_S = 1.0
"""How long one side waits, after a failure, for the words of the ranks that are alive."""

_LOOK_S = 0.1
_NEXT_S = 0.5
"""How often a worker that waits for a version asks whether the trainer still answers."""
_REASON_S = 0.2
"""By how much the store may learn of a death later than the carrier."""

_ERRORS: Mapping[str, type[WeightSyncError]] = {
    kind.__name__: kind for kind in (ConfigError, ManifestError, DeadlineError, TransportError)
}
"""The errors that workers raise in the words of the trainer, by name; a TransportError stands for any other."""


_MEET = {
    "expected": "every rank enters at the same time",
    "state": "no group was formed",
    "hint": "start the missing ranks, or correct world_size",
}


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as messages name them: ``"rank 2"``, or ``"ranks 2, 3"``."""
    listed = sorted(ranks)
    return ("rank " if len(listed) == 1 else "ranks ") + ", ".join(map(str, listed))


class GroupOffer(Wire, frozen=True, kw_only=True):
    """Where the members of a group meet.

    Attributes:
        master_address, master_port: of the trainer's store.
        secret: of members.
        members: number of ranks, the trainer included.
        backend: as for `Member`.
        timeout_s: deadline of every wait, in seconds.
    """

    master_address: Text
    master_port: Port
    secret: Text
    members: Count
    backend: Text
    timeout_s: Seconds

    def member(self) -> Member:
        """Return the place of a worker that takes the offer.

        Raises:
            ConfigError: its backend cannot be used here.
        """
        device, backend = choose_backend("cpu" if self.backend == "gloo" else None, self.backend)
        where = (self.master_address, self.master_port, self.secret)
        return Member(*where, device=device, backend=backend, timeout_s=self.timeout_s)


class _Note(Wire, frozen=True, kw_only=True):
    """A rank's description of itself, from which the trainer sees whether all ranks agree.

    Attributes:
        world_size: number of ranks that it expects; None leaves that to the trainer.
        process: its process's name in messages.
        params: the parameters that it expects to be moved; empty for any.
        backend: as in `Seat`.
        library: of its carrier.
        about: see `Group.about`.
    """

    world_size: int | None
    process: str
    params: Params
    backend: str
    library: str
    about: Any = None


class _Answer(Wire, frozen=True, kw_only=True):
    """The trainer's answer to all notes: the processes of all ranks, or the kind and text of an error."""

    peers: tuple[str, ...] = ()
    kind: str = ""
    error: str = ""


@final
class Group:
    """Ranks of which rank 0 broadcasts to all others, or one sends to another.

    The n-th `receive` from a peer gets the bytes of the n-th `send` of that peer to this rank; both have the same size.
    Any number of transfers may be in flight. Threads may share the group; the transfers of one pair count in the order
    in which they were begun.

    Args:
        seat: of this process.
        carrier: formed for this seat, and owned from here on.

    Attributes:
        store, rank, peers, device: as in `Seat`.
        carrier: moves the bytes.
        stop: set by another thread to end every wait.
        timeout_s: deadline of every wait, in seconds.
        alive: whether this end was not severed.
        world_size: number of ranks.
        workers: ranks other than 0.
        acknowledged: number of the handoff that this worker answered to last; 0 before the first.
        announced, params: number of the last announcement, 0 before the first, and its parameters.
        about: in rank 0, what each worker says of itself; not trusted.
        sent, received: bytes by peer, of the transfers that were waited for, as this end counts them.
    """

    def __init__(self, seat: Seat, carrier: Carrier) -> None:
        self.store, self.rank, self.peers, self.device = seat.store, seat.rank, seat.peers, seat.device
        self.timeout_s, self.stop = seat.within.timeout_s, seat.within.stop
        self.world_size, self.carrier = len(seat.peers), carrier
        self.alive, self.workers, self.acknowledged, self.announced = True, range(1, len(seat.peers)), 0, 0
        self.params: tuple[ParamMeta, ...] = ()
        self.about: dict[int, Any] = {}
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self._lock, self._order = threading.Lock(), threading.RLock()
        self._block: list[Move] | None = None
        self._end = weakref.finalize(self, carrier.abort)
        self._end.atexit = False  # then it is severed
        sever_at_exit(self)

    @classmethod
    def form(cls, seat: Seat, make: Callable[[Seat], Carrier] | None = None) -> Group:
        """Return a group once every rank has taken part in a first sum.

        Args:
            seat: of this process.
            make: makes its carrier; by default `carrier_of` its backend.

        Raises:
            TransportError, DeadlineError: not every rank takes part.
        """
        group = None
        try:
            make = make or cast(Callable[[Seat], Carrier], carrier_of(seat.backend))
            group = cls(seat, make(seat))
            total, expected = group.total(seat.rank + 1), len(seat.peers) * (len(seat.peers) + 1) / 2
            if total != expected:
                raise TransportError(f"a first sum over all ranks is {total:g}", expected=f"{expected:g}")
        except BaseException as error:
            if group is not None:
                group.sever()
            if not isinstance(error, RuntimeError):
                raise
            others = ", ".join(f"rank {rank} ({process})" for rank, process in seat.peers.items() if rank != seat.rank)
            raise (DeadlineError if isinstance(error, DeadlineError) else TransportError)(
                f"rank {seat.rank} could not form a {seat.backend} group of {len(seat.peers)}: {brief(error)}",
                expected=f"connections to {others}",
                state="no group was formed",
            ) from error
        return group

    # bytes

    def total(self, own: float) -> float:
        """Return the sum of a number of each rank (float32).

        Raises:
            TransportError, DeadlineError: as `wait`.
        """
        flat = torch.full((1,), own, dtype=torch.float32, device=self.device)
        self.wait(self._begin(Move("sum", flat)))
        return flat.item()

    def barrier(self) -> Move:
        """Begin a barrier, and return the transfer to `wait` for: then every rank has begun it."""
        return self._begin(Move("sum", torch.zeros(1, dtype=torch.float32, device=self.device)))

    def broadcast(self, flat: Tensor) -> Move:
        """Begin a broadcast of ``flat`` from rank 0, and return the transfer to `wait` for; else as `send`."""
        return self._begin(Move("broadcast", flat))

    def send(self, flat: Tensor, to: int) -> Move:
        """Begin to send ``flat`` to a rank, and return the transfer to `wait` for; until then it must not change.

        Args:
            flat: 1-D, contiguous, uint8, of one byte or more, on `device`.
            to: another rank.

        Raises:
            TransportError: the group was ended, or a connection broke.
            DeadlineError: the peers did not take part within `timeout_s`, where the carrier waits for them.
        """
        return self._begin(Move("send", flat, to))

    def receive(self, flat: Tensor, source: int) -> Move:
        """Begin to fill ``flat`` with the next bytes from a rank, and return the transfer to `wait` for; as `send`."""
        return self._begin(Move("receive", flat, source))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Begin the sends and receives of a block in one call, at its end; ones of a block that raises never begin.

        All ranks must begin the blocks that they share in one order; a transfer outside of any is a block.
        """
        with self._order:
            block = self._block = []
            try:
                yield
            finally:
                self._block = None
            self._launch(block)

    def _begin(self, move: Move) -> Move:
        with self._order:  # the pieces of two transfers must not mix
            if self._block is None:
                self._launch([move])
            else:
                self._block.append(move)
        return move

    def _launch(self, moves: list[Move]) -> None:
        if not self.alive:
            raise TransportError("the transfer was aborted")
        if not moves:
            return
        peers = sorted({move.peer for move in moves if move.peer is not None})
        try:
            self.carrier.begin(moves, Deadline(self.timeout_s, self.call(peers) or "the other ranks", self.stop))
        except WeightSyncError:
            raise
        except RuntimeError as error:
            raise self._broken(moves[0], error) from error

    def wait(self, move: Move) -> None:
        """Wait until a transfer is done; one that is done may be waited for again.

        Raises:
            TransportError: a connection broke, a peer is gone, or another thread aborted.
            DeadlineError: nothing moved for `timeout_s`; names the peer.
        """
        landed, within = 0, Deadline(self.timeout_s, stop=self.stop)
        while (not self.carrier.arrives(move, _LOOK_S) and move.failure is None) or self.stop.is_set():
            if move.landed != landed:
                landed, within = move.landed, within.again()
            if self._over:
                raise TransportError("the transfer was aborted")
            lost = self.store.lost()
            if lost and not self.carrier.arrives(move, _LOOK_S):  # its last bytes may be on their way to us
                raise TransportError(f"bytes moved{self._way(move)} when the group ended: {lost}")
            if error := self.carrier.error():
                raise self._broken(move, error)
            within.check(f"nothing moved{self._way(move)}")
        if move.failure is not None:
            raise self._broken(move, move.failure) from move.failure
        with self._lock:
            if not move.counted and move.peer is not None:
                (self.sent if move.kind == "send" else self.received)[move.peer] += move.landed
                move.counted = True

    @property
    def _over(self) -> bool:
        return self.stop.is_set() or not self.alive

    def _way(self, move: Move) -> str:
        return "" if move.peer is None else f" {'to' if move.kind == 'send' else 'from'} {self.call([move.peer])}"

    def _broken(self, move: Move, error: BaseException | str) -> TransportError:
        if self._over:
            return TransportError("the transfer was aborted")
        words = error if isinstance(error, str) else brief(error)
        return TransportError(f"a connection broke while bytes moved{self._way(move)}: {words}")

    # its end

    @property
    def intact(self) -> bool:
        """Whether every rank is in the group, as far as is known."""
        return self.alive and not self.store.lost()

    def call(self, ranks: Iterable[int]) -> str:
        """Return ranks as messages name them: ``"rank 2 (pid 17 on host)"``."""
        return ", ".join(f"rank {rank} ({self.peers[rank]})" for rank in ranks)

    def sever(self, reason: str = "") -> None:
        """End the group at once, here and at its peers, and every wait in other threads. May be called twice.

        Args:
            reason: for the other ranks.
        """
        with self._lock:
            if not self.alive:
                return
            self.alive = False
        self.store.close(reason or f"{self.call([self.rank])} left it")
        self._end()

    def explain(self, reason: str) -> str:
        """End the group for the other ranks, who may still leave a word; return why it ended, which may be earlier."""
        self.store.lost(Deadline(_REASON_S, stop=self.stop))  # a death is the better reason
        with suppress(WeightSyncError):  # the trainer is gone, which ends the group as well
            self.store.set(LOST, reason, keep=True)
        return self.store.lost(Deadline(LAST_WORDS_S))

    # handoffs

    def announce(self, arrival: Arrival) -> None:
        """Announce a version (trainer end); the announcement before is removed, since its readers have read it."""
        params = None if arrival.params == self.params else arrival.params  # a model's parameters rarely change
        announcement = _Announcement(version=arrival.version, params=params)
        self.store.set(f"announced/{self.announced + 1}", {**arrival.info, **announcement.to_json()})
        self.store.drop(f"announced/{self.announced}")
        self.announced, self.params = self.announced + 1, arrival.params

    def next(self, within: Deadline) -> Arrival | None:
        """Return the next announcement, or None at the deadline (worker end).

        Raises:
            NotConnectedError: the trainer ended the group or is gone, or another thread aborted.
            ConfigError: the announcement is malformed; the trainer hears of it.
        """
        try:
            while (found := self.store.find(f"announced/{self.announced + 1}", within.within(_NEXT_S))) is None:
                if within.stop.is_set() or not self.alive:
                    raise NotConnectedError("this rank aborted")
                if within.over:
                    return None
        except NotConnectedError as error:
            self.sever()
            raise NotConnectedError(
                f"rank {self.rank} is no longer connected to the trainer, {self.call([0])}: {error.what}",
                hint="connect again when the trainer does",
            ) from error
        with self.reading():
            note = _Announcement.from_json(found, f"an announcement of the trainer, {self.call([0])},")
        self.announced += 1
        self.params = self.params if note.params is None else note.params
        info = {name: value for name, value in found.items() if name not in ("version", "params")}
        return Arrival(version=note.version, params=self.params, info=info)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Sever the group where a worker cannot read what the trainer says, which waits for it and so hears why."""
        try:
            yield
        except BaseException as error:
            self.sever(f"{self.call([self.rank])} could not read a handoff: {why(error)}")
            raise

    def acknowledge(self, handoff: int, answer: int | str) -> None:
        """Tell the trainer how many bytes of a handoff came from rank to rank, or why it was refused (worker end)."""
        self.acknowledged = handoff
        self.store.set(f"arrived/{handoff}/{self.rank}", answer)

    def await_workers(self, handoff: int) -> dict[int, int]:
        """Wait until each worker has taken the handoff, and return the bytes that came to it from rank to rank.

        Raises:
            DeadlineError: names the workers that say nothing within the group's deadline.
            TransportError: a rank is gone or did not take it, or another thread aborted.
        """
        within, key = Deadline(self.timeout_s, stop=self.stop), f"arrived/{handoff}/"
        answers = self.store.collect(key, self.workers, within)
        if self._over:
            raise TransportError("the transfer was aborted")
        if failed := [rank for rank, answer in answers.items() if type(answer) is not int]:
            raise TransportError(f"{self.call(failed)} did not take it")
        if silent := [rank for rank in self.workers if rank not in answers]:
            if lost := self.store.lost():
                raise TransportError(f"the group ended before every worker had answered: {lost}")
            raise within.error(f"{self.call(silent)} did not confirm that it arrived")
        for done in (key, "over/"):
            self.store.drop(done)
        self.store.set(f"over/{handoff}", True)
        return answers

    def await_others(self) -> None:
        """Wait until every worker has answered to the handoff that this one answered to (worker end).

        Its connections close, by which workers that still receive see the group broken: they cannot tell a rank that
        has all from one that died.
        """
        if self.acknowledged and self.intact and isinstance(self.store, RemoteStore):
            self.store.patience_s = LAST_WORDS_S
            with suppress(NotConnectedError):  # the trainer is gone, so nobody receives any more
                self.store.find(f"over/{self.acknowledged}", Deadline(self.timeout_s, stop=self.stop))

    def sending_failed(self, handoff: int, version: int, error: WeightSyncError) -> WeightSyncError:
        """End the group; return the trainer's ``error`` with the ranks that are silent and the words of the others."""
        answers, silent, lost = dict[int, Any](), list[int](), ""
        if not self.stop.is_set():
            lost = self.explain(why(error))
            for _ in Deadline(LAST_WORDS_S, stop=self.stop).pauses():
                answers = self.store.collect(f"arrived/{handoff}/", self.workers, Deadline(0.0))
                silent = [rank for rank in self.workers if rank not in answers]
                if not silent:
                    break
        self.sever(why(error))
        missing = f"; no answer came from {self.call(silent)}" if silent else ""
        words = [f"rank {rank} says: {text}" for rank, text in answers.items() if text and type(text) is str]
        if lost not in error.what:
            words.append(f"the group ended: {lost}")
        return type(error)(
            f"weights version {version} did not reach {self.call(self.workers)}: {error.what}{missing}",
            expected=error.expected,
            state="; ".join([*words, "workers may hold a part of it, and the group is closed"]),
            hint="connect again (init_all_workers_group, or the next update_weights) when every worker is up",
        )

    def receiving_failed(self, handoff: int, version: int, error: WeightSyncError) -> WeightSyncError:
        """End the group; return the worker's ``error`` with the words of the trainer."""
        own = f"{self.call([self.rank])} failed: {why(error)}"
        with suppress(WeightSyncError):  # the trainer is gone
            self.acknowledge(handoff, why(error))
        reason = self.explain(own)
        if reason in ("", own):
            reason = "it reports no failure, so the network or another worker failed"
        self.sever(own)
        return type(error)(
            f"rank {self.rank} lost weights version {version} on its way from the trainer, "
            f"{self.call([0])}: {error.what}",
            expected=error.expected,
            state=f"of the trainer: {reason}. This rank may hold a part of the version, and its group is closed",
            hint="connect again when the trainer does",
        )

    def give_up(self, handoff: int, words: str) -> None:
        """Tell the trainer why this worker takes no more of a handoff, and sever the group."""
        if self.alive:  # else the interpreter may be ending, which closes iterators left half-way
            with suppress(WeightSyncError):  # the trainer is gone
                self.acknowledge(handoff, words)
            self.sever(f"{self.call([self.rank])} failed: {words}")


@final
class Member:
    """One rank's place in one connection after the other: its store, and then its group.

    Args:
        address, port: where workers reach the trainer's store.
        secret: of trainer and workers; "" lets in whoever finds the port, unless a control layer passes on one that
            the trainer makes.
        device, backend: of the groups, as `choose_backend` returns them.
        timeout_s: deadline of every wait, in seconds.
    """

    def __init__(
        self, address: str, port: int, secret: str, *, device: torch.device, backend: str, timeout_s: float
    ) -> None:
        self.address, self.port, self.secret = address, port, secret
        self.device, self.backend, self.timeout_s = device, backend, timeout_s
        self._store: KeyStore | None = None
        self._group: Group | None = None

    @property
    def connected(self) -> bool:
        """Whether there is a group that can be used."""
        return self._group is not None and self._group.intact

    def group(self, within: Deadline) -> Group:
        """Return the group, every wait in which ends from now on when ``within`` is stopped.

        Raises:
            NotConnectedError: there is none, or it ended; gives the reason.
        """
        group = self._group
        if group is None or not group.intact:
            lost = "" if group is None else f": its group was closed after a failure ({group.store.lost()})"
            raise NotConnectedError(
                f"this end of the transport is not connected{lost}",
                hint="call init_all_workers_group on every rank at the same time, or connect through a sender",
            )
        group.stop = within.stop
        return group

    def open(self, size: int, *, private: bool) -> GroupOffer:
        """Open a store for the next group, of ``size`` ranks (trainer end); it ends the last connection.

        Args:
            private: whether a control layer passes on a new secret; else ranks were given one.

        Raises:
            TransportError: the port is taken.
        """
        self.close("the trainer forms a new group")
        secret = uuid.uuid4().hex if private else self.secret
        if not secret and not is_loopback(self.address):
            log.warning("anyone who can reach %s can join the group and take the weights: set secret=", self.address)
        store = self.keep(HostedStore(self.address, self.port, secret))
        return GroupOffer(
            master_address=self.address,
            master_port=store.port,
            secret=secret,
            members=size,
            backend=self.backend,
            timeout_s=self.timeout_s,
        )

    def host(self, size: int, params: tuple[ParamMeta, ...], within: Deadline) -> Group:
        """Form the group with the workers that come to the open store (trainer end).

        Raises:
            DeadlineError: names the ranks that never arrived.
            ConfigError, ManifestError: a worker expects another world size, or other parameters; or its note is
                malformed.
            TransportError: connections could not be made, or another thread ended the wait.
        """
        store, within = self._store, self._deadline(within)
        if store is None:
            raise NotConnectedError("the connection was closed", hint="open it again")
        try:
            notes = _admit(store, size, self._note(size, params), within)
            peers = {rank: note.process for rank, note in notes.items()}
            self._group = Group.form(Seat(store, 0, peers, self.device, self.backend, within.again()))
            self._group.about = {rank: note.about for rank, note in notes.items()}
            for key in ("answer", "note/", "ready/", "group/"):  # every rank is past them, since it took part
                store.drop(key)
        except BaseException as error:
            self.close(why(error))
            raise
        return self._group

    def enter(
        self,
        rank: int,
        size: int | None,
        params: tuple[ParamMeta, ...],
        within: Deadline,
        *,
        about: Any = None,
        again: bool = False,
    ) -> Group:
        """Join the group that the trainer forms (worker end).

        Args:
            about: what the trainer finds in `Group.about`, for JSON.
            again: whether a store that ends while this rank waits is the last connection's, and another one follows.

        Raises:
            DeadlineError: names the ranks that never arrived.
            ConfigError, ManifestError: the trainer expects something else, or its answer is malformed.
            TransportError: connections could not be made, or another thread ended the wait.
        """
        self.close()
        within, own = self._deadline(within), self._note(size, params, about)
        store, peers = None, None
        while peers is None:
            store = self.keep(RemoteStore(self.address, self.port, self.secret, within))
            try:
                peers = _wait_for_admission(store, rank, own, within)
            except NotConnectedError:
                if not again or within.over:
                    raise
            except BaseException:
                self.close()
                raise
        assert store is not None
        try:
            seat = Seat(store, rank, peers, self.device, self.backend, within.again())
            self._group = Group.form(seat)
        except BaseException as error:
            self.close(why(error))
            raise
        return self._group

    def close(self, reason: str = "") -> None:
        """Leave the group, a worker once the others have what it has, and close the store. May be called twice."""
        group, self._group = self._group, None
        if group is not None:
            if not reason:
                group.await_others()
            group.sever(reason or ("the trainer shut it down" if group.rank == 0 else ""))
        if self._store is not None:
            self._store.close(reason)
            self._finalizer.detach()
            self._store = None

    def _deadline(self, within: Deadline) -> Deadline:
        return Deadline(self.timeout_s, stop=within.stop)

    def keep(self, store: Store) -> Store:
        """Own the store of the next group from here on, and return it."""
        self._store, self._finalizer = store, weakref.finalize(self, store.close)
        self._finalizer.atexit = False  # at the end of a process its connections close by themselves
        return store

    def take(self, group: Group) -> None:
        """Own the group that was formed."""
        self._group = group

    def _note(self, size: int | None, params: tuple[ParamMeta, ...], about: Any = None) -> _Note:
        return _Note(
            world_size=size,
            process=f"pid {os.getpid()} on {socket.gethostname()}",
            params=params,
            backend=self.backend,
            library=carrier_of(self.backend).library,
            about=about,
        )


def _admit(store: KeyStore, size: int, own: _Note, within: Deadline) -> dict[int, _Note]:
    """Wait until every worker has left its note, check whether all agree, and let them in (trainer end).

    Returns:
        The note of each rank, this one included.
    """
    workers = range(1, size)
    found = store.collect("note/", workers, within)
    try:
        if absent := [rank for rank in workers if rank not in found]:
            _check_alive(store)
            raise within.error(f"{ranks_text(absent)} of world size {size} did not arrive at {store.address}", **_MEET)
        notes = {rank: _Note.from_json(read, f"the note of rank {rank}") for rank, read in found.items()}
        for rank, note in notes.items():
            _agree(rank, own, note)
    except WeightSyncError as error:
        store.set("answer", {"kind": type(error).__name__, "error": str(error)})
        for _ in Deadline(LAST_WORDS_S).pauses():  # until each has read it
            if not store.collect("note/", found, Deadline(0.0)):
                break
        raise
    notes = {0: own, **notes}
    store.set("answer", {"peers": [note.process for note in notes.values()]})
    # a rank that died while others were awaited is named here, before a constructor blocks on it
    ready = store.collect("ready/", workers, within)
    if absent := [rank for rank in workers if rank not in ready]:
        _check_alive(store)
        who = ", ".join(f"rank {rank} ({notes[rank].process})" for rank in absent)
        raise within.error(
            f"{who} arrived but then did not answer",
            state="no group was formed",
        )
    return notes


def _wait_for_admission(store: RemoteStore, rank: int, own: _Note, within: Deadline) -> dict[int, str]:
    """Leave this rank's note, and wait until the trainer lets everyone in (worker end); return all processes."""
    store.set(f"note/{rank}", own.to_json())
    found = store.find("answer", within)
    store.drop(f"note/{rank}")
    if found is None:
        raise within.error(f"the trainer at {store.address} let nobody in", **_MEET)
    answer = _Answer.from_json(found, "the answer of the trainer (rank 0)")
    if answer.error:
        raise _ERRORS.get(answer.kind, TransportError)(f"the trainer formed no group: {answer.error}")
    peers = dict(enumerate(answer.peers))
    if peers.get(rank) != own.process:
        raise ConfigError(
            f"to the trainer {peers.get(rank, 'nobody')} is rank {rank} of world_size {len(peers)}",
            expected=own.process,
            state="no group was joined",
        )
    store.will(LOST, f"rank {rank} ({own.process}) is gone")
    store.set(f"ready/{rank}", True)
    return peers


def _check_alive(store: KeyStore) -> None:
    if lost := store.lost():
        raise TransportError(f"the connection ended before the group was formed: {lost}", state="no group was formed")


def _agree(rank: int, own: _Note, note: _Note) -> None:
    """Raise the error that names the first thing on which a worker and the trainer disagree."""
    theirs, ours = ({meta.name: meta for meta in one.params} for one in (note, own))
    claims = [
        ("world_size", note.world_size or own.world_size, own.world_size),
        ("backend", note.backend, own.backend),
        ("the library that carries its bytes", note.library, own.library),
        *((f"parameter {name!r}", theirs.get(name), ours.get(name)) for name in ours | theirs if ours and theirs),
    ]
    for what, there, here in claims:
        if there != here:
            raise (ManifestError if what.startswith("parameter") else ConfigError)(
                f"rank {rank} has {there or 'nothing'} as {what}, and rank 0 has {here or 'nothing'}",
                expected="the same on every rank",
                state="no group was formed",
                hint="give every rank the same settings, and install nccl4py on all or none",
            )


class _Announcement(Wire, frozen=True, kw_only=True):
    """A version that comes next, beside the info of its handoff; without ``params`` it has those of the one before."""

    version: Count
    params: Params | None = None


class GroupLoad(Wire, frozen=True, kw_only=True):
    """One handoff; a transport adds what its workers need to receive it.

    Attributes:
        handoff: its number in the group.
    """

    handoff: Count


class _Incoming(Protocol):
    def pairs(self) -> Iterator[tuple[str, Tensor]]: ...


class GroupWorker(StandaloneEnd):
    """A worker's end in a group: it takes each handoff, or tells the trainer why not and ends the group.

    A subclass says what arrives, in `incoming`.

    Args:
        member: of the group.
        here: this worker.
    """

    load: ClassVar[type[GroupLoad]]
    """Of each handoff."""

    def __init__(self, member: Member, here: Worker) -> None:
        self.member = member

    @classmethod
    def about(cls, here: Worker) -> Any:
        """Return what the trainer has to know of a worker, for JSON; it finds it in `Group.about`."""
        return None

    @abstractmethod
    def incoming(self, group: Group, load: Any, arrival: Arrival, into: Mapping[str, Tensor]) -> _Incoming:
        """Return the receiver of one handoff.

        Args:
            group: of this worker.
            load: of class `load`.
            arrival, into: as for `LandingEnd.receive`.

        Returns:
            An object whose ``pairs()`` are those of `LandingEnd.receive`.
        """

    def next(self, within: Deadline, received: Arrival | None = None) -> Arrival | None:
        """Return the next announcement, or None at the deadline; errors as `Group.next`."""
        return self.member.group(within).next(within)

    def receive(self, arrival: Arrival, into: Mapping[str, Tensor], within: Deadline) -> Iterator[tuple[str, Tensor]]:
        group = self.member.group(within)
        with group.reading():
            load = self.load.from_json(arrival.info, f"the handoff of weights version {arrival.version}")
            pairs = self._receiving(arrival, group, load, self.incoming(group, load, arrival, into))
        next(pairs)  # from here on the trainer hears of a loader that asks for nothing, too
        return pairs

    def _receiving(self, arrival: Arrival, group: Group, load: GroupLoad, incoming: _Incoming) -> Iterator[Any]:
        """Yield None once the handoff has begun, and then its pairs."""
        name, before = None, group.received.total()
        try:
            yield None
            for name, tensor in incoming.pairs():
                yield name, tensor
            group.acknowledge(load.handoff, group.received.total() - before)  # the loader took the last one, too
        except WeightSyncError as error:
            raise group.receiving_failed(load.handoff, arrival.version, error) from error
        except BaseException as error:
            stopped = "it loaded nothing" if name is None else f"it stopped loading after {name!r}"
            group.give_up(load.handoff, stopped if type(error) is GeneratorExit else why(error))
            raise

    def refuse(self, arrival: Arrival, error: BaseException) -> None:
        group = self.member.group(Deadline(0.0))
        with group.reading():
            load = self.load.from_json(arrival.info, f"the handoff of weights version {arrival.version}")
        group.give_up(load.handoff, why(error))

    def close(self) -> None:
        self.member.close()
