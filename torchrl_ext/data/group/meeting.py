"""Ranks find each other in the trainer's notes, and agree on their settings before a group is formed.

Ranks that do not come are named. Notes come from other processes, so each is checked before it is used.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import torch

from torchrl_ext.base import errors
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import ConfigError, DeadlineError, ManifestError, NotConnectedError, TransportError
from torchrl_ext.base.types import Count, ParamMeta, Params, Port, Seconds, Text, Wire, is_loopback
from torchrl_ext.data.group.backends import carrier_of, choose_backend
from torchrl_ext.data.group.links import ranks_text
from torchrl_ext.data.group.nccl import settings
from torchrl_ext.data.group.notes import HostedNotes, NoteStore, RemoteNotes
from torchrl_ext.data.group.process_group import Group, Seat, form_group, severed

__all__ = [
    "LAST_WORDS_S",
    "LOOK_S",
    "STANDALONE_GROUP",
    "GroupOffer",
    "Member",
    "Membership",
    "Note",
    "enter",
    "host",
]  # fmt: skip

log = logging.getLogger("torchrl_ext")

STANDALONE_GROUP = "standalone"
"""The rendezvous key of ranks without a control layer."""

LAST_WORDS_S = 1.0
"""How long one side waits, after a failure, for the words of the ranks that are alive."""

LOOK_S = 0.5
"""How often a rank that waits looks whether its group is still there."""

_ERRORS: Mapping[str, type[errors.WeightSyncError]] = {
    kind.__name__: kind for kind in (ConfigError, ManifestError, DeadlineError, TransportError)
}
"""The errors that workers raise in the words of the trainer, by name; a TransportError stands for any other."""


class GroupOffer(Wire, frozen=True, kw_only=True):
    """Where the members of a group meet.

    Attributes:
        master_address, master_port: of the trainer's notes.
        secret: what members know.
        room: the rendezvous key.
        members: number of ranks, the trainer included.
        backend: as for `Membership`.
        timeout_s: deadline of every wait, in seconds.
    """

    master_address: Text
    master_port: Port
    secret: Text
    room: Text
    members: Count
    backend: Text
    timeout_s: Seconds

    def member(self) -> Membership:
        """Return the membership of a worker that takes the offer.

        Raises:
            ConfigError: its backend cannot be used here.
        """
        device, backend = choose_backend("cpu" if self.backend == "gloo" else None, self.backend)
        where = (self.master_address, self.master_port, self.secret)
        return Membership(*where, device=device, backend=backend, timeout_s=self.timeout_s)


class Member(ABC):
    """One rank's place in one group after the other.

    Attributes:
        stop: set by another thread to end every wait.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._group: Group | None = None

    def under(self, within: Deadline) -> None:
        """End every wait of the next step, here and in the group, when ``within`` is stopped."""
        self.stop = within.stop
        if self._group is not None:
            self._group.stop = within.stop

    @property
    def connected(self) -> bool:
        """Whether there is a group that can be used."""
        return self._group is not None and self._group.alive

    def carrier(self) -> Any:
        """Return the current group, of the class that this place forms.

        Raises:
            NotConnectedError: there is none, or it was closed.
        """
        if self._group is None or not self._group.alive:
            closed = "" if self._group is None else ": its group was closed after a failure"
            raise NotConnectedError(
                f"this end of the transport is not connected{closed}",
                hint="call init_all_workers_group on every rank at the same time, or connect through a sender",
            )
        return self._group

    @abstractmethod
    def close(self) -> None:
        """Leave the group, and end every wait in it. May be called twice."""


class Membership(Member):
    """Forms the groups of one rank, one after the other, and ends them.

    Args:
        address, port: where workers reach the trainer's notes.
        secret: of trainer and workers; "" lets in whoever finds the port, unless a control layer passes on one that
            the trainer makes.
        device, backend: of the groups, as `choose_backend` returns them.
        timeout_s: deadline of every wait, in seconds.
    """

    def __init__(
        self, address: str, port: int, secret: str, *, device: torch.device, backend: str, timeout_s: float
    ) -> None:
        super().__init__()
        self.address = address.removeprefix("[").removesuffix("]")  # of IPv6, as URLs have it
        self.port, self.device, self.backend, self.timeout_s = port, device, backend, timeout_s
        self._secret, self._private = secret, secret or uuid.uuid4().hex
        self._notes: NoteStore | None = None
        self._generations = 0

    def notes(self, key: str) -> NoteStore:
        """Return the notes that the trainer hosts, for the ranks of a rendezvous key (trainer end).

        Raises:
            TransportError: the port is taken.
        """
        secret = self._secret if key == STANDALONE_GROUP else self._private
        if self._notes is not None and self._notes.secret != secret:
            self._end_notes()
        if self._notes is None and not secret and not is_loopback(self.address):
            log.warning("anyone who can reach %s can join the group and take the weights: set secret=", self.address)
        return self._notes or self._keep(HostedNotes(self.address, self.port, secret))

    def invite(self, room: str, size: int) -> GroupOffer:
        """Return the offer to the other ranks of a group of ``size`` (trainer end).

        Raises:
            TransportError: the port is taken.
        """
        notes = self.notes(room)
        return GroupOffer(
            master_address=self.address,
            master_port=notes.port,
            secret=notes.secret,
            room=room,
            members=size,
            backend=self.backend,
            timeout_s=self.timeout_s,
        )

    def host(self, key: str, size: int, params: tuple[ParamMeta, ...]) -> None:
        """Form the next group with the workers that wait under a rendezvous key (trainer end).

        Raises:
            DeadlineError, ConfigError, ManifestError: as `host`.
            TransportError: connections could not be made.
        """
        self.leave()
        notes = self.notes(key)
        self._generations += 1
        generation = str(self._generations)
        peers = host(notes, key, generation, self._own_note(size, params), self._deadline())
        self._form(notes, generation, 0, peers)

    def enter(self, key: str, rank: int, size: int | None, params: tuple[ParamMeta, ...]) -> None:
        """Join the group that the trainer forms under a rendezvous key (worker end).

        Raises:
            DeadlineError, ConfigError, ManifestError: as `enter`.
            TransportError: connections could not be made.
        """
        self.leave()
        self._end_notes()
        within = self._deadline()
        notes = self._keep(RemoteNotes(self.address, self.port, self._secret, within))
        generation, peers = enter(notes, key, rank, self._own_note(size, params), within)
        self._form(notes, generation, rank, dict(enumerate(peers)))

    def leave(self) -> None:
        """End the group, if there is one."""
        group, self._group = self._group, None
        if group is not None:
            group.sever("the trainer shut it down or forms a new one" if group.rank == 0 else "")
            if group.rank == 0:
                group.notes.drop(f"{group.generation}/")

    def close(self) -> None:
        """Leave the group, a worker once the others have what it has, and close the notes. May be called twice."""
        if self._group is not None and self._group.acknowledged:
            self._await_others(self._group)
        self.stop.set()
        self.leave()
        self._end_notes()

    def _await_others(self, group: Group) -> None:
        """Wait until every worker has answered to the handoff that this one answered to.

        Its connections close, by which workers that still receive see the group broken: they cannot tell a rank that
        has all from one that died.
        """
        within = self._deadline()
        group.notes.patience_s = LAST_WORDS_S
        with suppress(NotConnectedError):  # the trainer is gone, so nobody receives any more
            while group.intact and not within.over:
                if group.notes.wait(f"{group.generation}/over/{group.acknowledged}", within.within(LOOK_S)):
                    return

    def _form(self, notes: NoteStore, generation: str, rank: int, peers: dict[int, str]) -> None:
        seat = Seat(notes, generation, rank, peers, self.device, self.backend, self._deadline())
        try:
            self._group = form_group(seat, carrier_of(self.backend))
        except (TransportError, DeadlineError) as error:
            raise type(error)(
                f"rank {rank} could not form a {self.backend} group of {len(peers)}: {error.what}",
                expected=f"connections to {', '.join(f'rank {r} ({p})' for r, p in peers.items() if r != rank)}",
                state="no group was formed",
            ) from error

    def _deadline(self) -> Deadline:
        return Deadline(self.timeout_s, stop=self.stop)

    def _keep(self, notes: NoteStore) -> NoteStore:
        self._notes, self._close_notes = notes, weakref.finalize(self, notes.close)
        # at the end of a process its connections close by themselves; closing them in a fork would end its parent's
        self._close_notes.atexit = False
        return notes

    def _end_notes(self) -> None:
        if self._notes is not None:
            self._close_notes()
            self._notes = None

    def _own_note(self, size: int | None, params: tuple[ParamMeta, ...]) -> Note:
        return Note(
            world_size=size,
            process=f"pid {os.getpid()} on {socket.gethostname()}",
            params=params,
            backend=self.backend,
            library=carrier_of(self.backend).library,
            settings=settings() if self.backend == "nccl" else {},
        )


class Note(Wire, frozen=True, kw_only=True):
    """A rank's description of itself, from which the trainer sees whether all ranks agree.

    Attributes:
        world_size: number of ranks that it expects; None leaves that to the trainer.
        process: how to call its process in a message.
        params: the parameters that it expects to be moved; empty for any.
        backend: as in `Seat`.
        library: of its carrier.
        settings: variables of its environment on which ranks must agree, as far as they are set.
        token: names the note in which the trainer answers.
    """

    world_size: int | None
    process: str
    params: Params
    backend: str
    library: str
    settings: dict[str, str]
    token: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)


class _Answer(Wire, frozen=True, kw_only=True):
    """The trainer's answer to a note: a group with the processes of all its ranks, or the kind and text of an error."""

    generation: str = ""
    peers: tuple[str, ...] = ()
    kind: str = ""
    error: str = ""


def host(notes: NoteStore, key: str, generation: str, own: Note, within: Deadline) -> dict[int, str]:
    """Wait until every worker has left its note, check whether all agree, and let them in (trainer end).

    Args:
        notes: of the trainer.
        key: the rendezvous key of the ranks.
        generation: of the group that they form.
        own: this rank's note, with a ``world_size``.
        within: deadline.

    Returns:
        How to call the process of each rank, this one included.

    Raises:
        DeadlineError: names the ranks that never arrived.
        ConfigError, ManifestError: a worker expects another world size, or other parameters; or its note is malformed.
        TransportError: another thread ended the wait.
    """
    size = own.world_size or 1
    workers = range(1, size)
    notes.put(f"{key}/0", own.to_json())
    try:
        found = notes.collect(f"{key}/", workers, within)
        tokens = [read.get("token") for read in found.values() if type(read) is dict]
        answers = [f"{key}/answer/{token}" for token in tokens if type(token) is str]
        for rank in found:
            notes.drop(f"{key}/{rank}")
        try:
            if absent := [rank for rank in workers if rank not in found]:
                raise _absent(f"{ranks_text(absent)} of world size {size}", notes, within)
            notes_of = {rank: Note.from_json(read, f"the note of rank {rank}") for rank, read in found.items()}
            for rank, note in notes_of.items():
                _agree(rank, _claims(own, note))
        except errors.WeightSyncError as error:
            for answer in answers:
                notes.put(answer, {"kind": type(error).__name__, "error": str(error)})
            raise
        peers = {0: own.process, **{rank: note.process for rank, note in notes_of.items()}}
        for answer in answers:
            notes.put(answer, {"generation": generation, "peers": list(peers.values())})
        # a rank that died while others were awaited is named here, before a constructor blocks on it
        ready = notes.collect(f"{generation}/ready/", workers, within)
        if absent := [rank for rank in workers if rank not in ready]:
            raise within.error(
                f"{ranks_text(absent)} ({', '.join(peers[rank] for rank in absent)}) arrived but then did not answer",
                state="no group was formed",
            )
        return peers
    finally:
        notes.drop(f"{key}/0")


def enter(notes: NoteStore, key: str, rank: int, own: Note, within: Deadline) -> tuple[str, Sequence[str]]:
    """Leave this rank's note, and wait until the trainer lets everyone in (worker end); arguments as for `host`.

    Returns:
        The generation of the group that is formed now, and how to call the process of each rank, from 0 on.

    Raises:
        DeadlineError: names the ranks that never arrived.
        ConfigError, ManifestError: the trainer expects something else, or its answer is malformed.
        TransportError: another thread ended the wait.
    """
    notes.put(f"{key}/{rank}", own.to_json())
    found = notes.wait(f"{key}/answer/{own.token}", within)
    if not found:
        notes.drop(f"{key}/{rank}")
        absent = [other for other in range(own.world_size or 1) if other != rank and not notes.has(f"{key}/{other}")]
        raise _absent(ranks_text(absent or [0]), notes, within)
    notes.drop(f"{key}/answer/{own.token}")
    answer = _Answer.from_json(found[0], "the answer of the trainer (rank 0)")
    if answer.error:
        raise _ERRORS.get(answer.kind, TransportError)(f"the trainer formed no group: {answer.error}")
    size, expected = len(answer.peers), own.world_size or max(rank + 1, len(answer.peers))
    _agree(rank, [("world_size", expected, size, "")])
    notes.put_at_end(severed(answer.generation), f"rank {rank} ({answer.peers[rank]}) is gone")
    notes.put(f"{answer.generation}/ready/{rank}", True)
    return answer.generation, answer.peers


def _absent(who: str, notes: NoteStore, within: Deadline) -> errors.WeightSyncError:
    return within.error(
        f"{who} did not arrive at {notes.address}",
        expected="every rank enters at the same time",
        state="no group was formed",
        hint="start the missing ranks, or correct world_size",
    )


def _claims(own: Note, note: Note) -> Iterator[tuple[str, object, object, str]]:
    """Yield each thing on which a worker has to agree with the trainer: its name, what each of them has, and a hint."""
    if note.world_size is not None:
        yield "world_size", note.world_size, own.world_size, "give 1 + the number of workers"
    yield "backend", note.backend, own.backend, "give backend= on every rank, or devices of the same kind"
    hint = "install nccl4py (pip install 'torchrl_ext[nccl]') on every rank, or on none"
    yield "the library that carries its bytes", note.library, own.library, hint
    for name in [*own.settings, *note.settings]:
        theirs = note.settings.get(name)
        hint = f"start the trainer with {name}={theirs}" if theirs else f"start all without {name}"
        yield f"the environment variable {name}", theirs, own.settings.get(name), hint
    rows, own_rows = ({meta.name: meta for meta in one.params} for one in (note, own))
    for name in [*own_rows, *rows] if own_rows and rows else ():
        yield f"parameter {name!r}", rows.get(name), own_rows.get(name), ""


def _agree(rank: int, claims: Iterable[tuple[str, object, object, str]]) -> None:
    """Raise the error that names the first thing on which a worker and the trainer disagree."""
    for what, *both, hint in claims:
        if both[0] != both[1]:
            theirs, own = ("nothing" if value is None else value for value in both)
            raise (ManifestError if what.startswith("parameter") else ConfigError)(
                f"rank {rank} has {theirs} as {what}, and rank 0 has {own}",
                expected="the same on every rank",
                state="no group was formed",
                hint=hint,
            )
