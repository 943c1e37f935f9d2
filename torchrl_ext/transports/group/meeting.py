"""Ranks find each other in the trainer's notes, and agree on their settings before a group is formed.

Ranks that do not come are named. Notes come from other processes, so each is checked before it is used.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
import weakref
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import msgspec
import torch

from torchrl_ext import errors
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError, DeadlineError, NotConnectedError, TransportError
from torchrl_ext.transports.base import Arrival
from torchrl_ext.transports.group.handoffs import Announcements, await_others
from torchrl_ext.transports.group.notes import HostedNotes, NoteStore, RemoteNotes
from torchrl_ext.transports.group.peers import PeerGroup, Severance
from torchrl_ext.transports.group.process_group import Group
from torchrl_ext.transports.links import ranks_text
from torchrl_ext.transports.standalone import Mailbox
from torchrl_ext.types import ParamMeta

__all__ = ["STANDALONE_GROUP", "Membership", "Note", "enter", "host"]

STANDALONE_GROUP = "standalone"
"""The rendezvous key of ranks without a control layer."""

_SETTINGS = {"nccl": ("NCCL_CUMEM_ENABLE", "NCCL_CUMEM_HOST_ENABLE")}
"""Environment variables, by backend, that must be the same on all ranks of a communicator; engines set some for
themselves (vLLM sets ``NCCL_CUMEM_ENABLE=0``)."""

_ERRORS: Mapping[str, type[errors.WeightSyncError]] = {
    kind.__name__: kind
    for kind in (errors.ConfigError, errors.ManifestError, errors.DeadlineError, errors.TransportError)
}
"""The errors that a trainer may report to workers, by name."""

_AGAIN = "call init_all_workers_group on every rank at the same time, or connect through a sender"

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class Membership:
    """Forms the groups of one rank, one after the other, and ends them.

    Args:
        address, port: where workers reach the trainer's notes.
        secret: of trainer and workers; "" lets in whoever finds the port, unless a control layer passes on one that
            the trainer makes.
        device, backend: of the groups; the backend is ``"gloo"``, ``"nccl"`` or ``"nixl"``.
        timeout_s: deadline of every wait, in seconds.
    """

    def __init__(
        self, address: str, port: int, secret: str, *, device: torch.device, backend: str, timeout_s: float
    ) -> None:
        self.address, self.port, self.device, self.backend = address, port, device, backend
        self.timeout_s = timeout_s
        self._secret, self._private = secret, secret or uuid.uuid4().hex
        self.stop = threading.Event()
        self._notes: NoteStore | None = None
        self._group: PeerGroup | None = None
        self._announcements: Announcements | None = None
        self._generations = 0

    def under(self, within: Deadline) -> None:
        """End every wait of the next step, here and in the group, when ``within`` is stopped."""
        self.stop = within.stop
        if self._notes is not None:
            self._notes.stop = within.stop
        if self._group is not None:
            self._group.under(within.stop)

    @property
    def connected(self) -> bool:
        """Whether there is a group that can be used."""
        return self._group is not None and self._group.alive

    def carrier(self) -> PeerGroup:
        """Return the current group.

        Raises:
            NotConnectedError: there is none, or it was closed.
        """
        if self._group is None or not self._group.alive:
            closed = "" if self._group is None else ": its group was closed after a failure"
            raise NotConnectedError(f"this end of the collective transport is not connected{closed}", hint=_AGAIN)
        return self._group

    def group(self) -> Group:
        """As `carrier`, of a gloo or NCCL group, which can broadcast."""
        return cast(Group, self.carrier())

    def announcements(self) -> Announcements:
        """Return this rank's place in the announcements to the current group; errors as `carrier`."""
        group = self.carrier()
        if self._announcements is None or self._announcements.group is not group:
            self._announcements = Announcements(group)
        return self._announcements

    def notes(self, key: str) -> NoteStore:
        """Return the notes that the trainer hosts, for the ranks of a rendezvous key (trainer end).

        Raises:
            TransportError: the port is taken.
        """
        secret = self._secret if key == STANDALONE_GROUP else self._private
        if self._notes is not None and self._notes.secret != secret:
            self._end_notes()
        return self._notes or self._keep(HostedNotes(self.address, self.port, secret, self.stop))

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
        peers = host(notes, key, generation, self._own_note(size, params), Deadline(self.timeout_s, stop=self.stop))
        self._form(notes, generation, 0, peers)

    def enter(self, key: str, rank: int, size: int | None, params: tuple[ParamMeta, ...]) -> None:
        """Join the group that the trainer forms under a rendezvous key (worker end).

        Raises:
            DeadlineError, ConfigError, ManifestError: as `enter`.
            TransportError: connections could not be made.
        """
        self.leave()
        self._end_notes()
        within = Deadline(self.timeout_s, stop=self.stop)
        notes = self._keep(RemoteNotes(self.address, self.port, self._secret, self.stop, timeout_s=self.timeout_s))
        generation, peers = enter(notes, key, rank, self._own_note(size, params), within)
        self._form(notes, generation, rank, dict(enumerate(peers)))

    def leave(self) -> None:
        """End the group, if there is one."""
        group, self._group = self._group, None
        if group is not None:
            group.sever("the trainer shut it down or forms a new one" if group.rank == 0 else "")
            group.notes.sweep(*(f"{kind}/{group.generation}/" for kind in ("announced", "arrived", "over")))

    def abort(self) -> None:
        """End every wait, from another thread; the group is lost."""
        self.stop.set()
        if (group := self._group) is not None:
            group.sever(f"{group.call([group.rank])} aborted")

    def close(self) -> None:
        """Leave the group, a worker once the others have what it has, and close the notes. May be called twice."""
        if self._group is not None and self._group.acknowledged:
            await_others(self._group)
        self.stop.set()
        self.leave()
        self._end_notes()

    def _form(self, notes: NoteStore, generation: str, rank: int, peers: dict[int, str]) -> None:
        how: dict[str, Any] = {"device": self.device, "timeout_s": self.timeout_s}
        try:
            if self.backend == "nixl":
                from torchrl_ext.transports.sharded.nixl import NixlGroup

                self._group = NixlGroup(notes, generation, rank, peers, **how)
            else:
                self._group = Group(notes, generation, rank, peers, backend=self.backend, **how)
        except (TransportError, DeadlineError) as error:
            raise type(error)(
                f"rank {rank} could not form a {self.backend} group of {len(peers)}: {error.what}",
                expected=f"connections to {', '.join(f'rank {r} ({p})' for r, p in peers.items() if r != rank)}",
                state="no group was formed",
            ) from error

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
            timeout_s=self.timeout_s,
            process=f"pid {os.getpid()} on {socket.gethostname()}",
            params=[meta.to_json() for meta in params],
            backend=self.backend,
            settings={name: os.environ.get(name) for name in _SETTINGS.get(self.backend, ())},
        )


class GroupMailbox(Mailbox):
    """Announces versions in the notes of a group.

    Args:
        member: of the group.
    """

    def __init__(self, member: Membership) -> None:
        self.member = member

    def put(self, arrival: Arrival, within: Deadline) -> None:
        self.member.under(within)
        self.member.announcements().put(arrival)

    def get(self, within: Deadline, received: Arrival | None = None) -> Arrival | None:
        """Return the next announcement, or None at the deadline.

        Raises:
            NotConnectedError: there is no group, or the trainer ended it or is gone.
        """
        self.member.under(within)
        return self.member.announcements().get(within)


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's description of itself, from which the trainer sees whether all ranks agree.

    Attributes:
        world_size: number of ranks that it expects; None leaves that to the trainer.
        timeout_s: deadline of its waits, in seconds.
        process: how to call its process in a message.
        params: the parameters that it expects to be moved, `ParamMeta.to_json` of each; empty for any.
        backend: ``"gloo"``, ``"nccl"`` or ``"nixl"``.
        settings: variables of its environment on which ranks must agree, and None for those that are not set.
        token: names the note in which the trainer answers.
    """

    world_size: int | None
    timeout_s: float
    process: str
    params: list[list[Any]]
    backend: str
    settings: dict[str, str | None]
    token: str = ""


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's answer to a note: a group with the processes of all its ranks, or the kind and text of an error."""

    generation: str = ""
    peers: list[str] = []
    kind: Any = None
    error: str | None = None


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
        ConfigError, ManifestError: a worker expects another world size, or other parameters.
        TransportError: a worker's note cannot be read.
    """
    size = own.world_size or 1
    workers = range(1, size)
    notes.put(f"{key}/0", msgspec.to_builtins(own))
    try:
        found = notes.collect(f"{key}/", workers, within.until)
        tokens = [read.get("token") for read in found.values() if type(read) is dict]
        answers = [f"{key}/answer/{token}" for token in tokens if type(token) is str]
        for rank in found:
            notes.drop(f"{key}/{rank}")
        try:
            if within.stop.is_set():
                raise TransportError("forming the group was aborted")
            absent = [rank for rank in workers if rank not in found]
            if absent:
                raise within.error(
                    f"{ranks_text(absent)} of world size {size} did not arrive at {notes.address}",
                    expected="every rank enters at the same time",
                    state="no group was formed",
                    hint="start the missing workers, or mend world_size",
                )
            told = {rank: _read(read, Note, f"the note of rank {rank}") for rank, read in found.items()}
            for rank, note in told.items():
                _agree(own, rank, note)
        except errors.WeightSyncError as error:
            kind = next((name for name, kind in _ERRORS.items() if type(error) is kind), "TransportError")
            for answer in answers:
                notes.put(answer, {"kind": kind, "error": str(error)})
            raise
        peers = {0: own.process, **{rank: note.process for rank, note in told.items()}}
        for answer in answers:
            notes.put(answer, {"generation": generation, "peers": list(peers.values())})
        # a rank that died while others were awaited is named here, before a constructor blocks on it
        ready = notes.collect(f"ready/{generation}/", workers, within.until)
        if within.stop.is_set():
            raise TransportError("forming the group was aborted")
        absent = [rank for rank in workers if rank not in ready]
        if absent:
            raise within.error(
                f"{ranks_text(absent)} ({', '.join(peers[rank] for rank in absent)}) arrived and then did not answer",
                state="no group was formed",
            )
        return peers
    finally:
        notes.drop(f"{key}/0")


def enter(notes: NoteStore, key: str, rank: int, own: Note, within: Deadline) -> tuple[str, list[str]]:
    """Leave this rank's note, and wait until the trainer lets everyone in (worker end); arguments as for `host`.

    Returns:
        The generation of the group that is formed now, and how to call the process of each rank, from 0 on.

    Raises:
        DeadlineError: names the ranks that never arrived.
        ConfigError, ManifestError: the trainer expects something else.
        TransportError: the trainer's answer cannot be read.
    """
    token = uuid.uuid4().hex
    notes.put(f"{key}/{rank}", {**msgspec.to_builtins(own), "token": token})
    found = notes.wait(f"{key}/answer/{token}", within.until)
    if not found:
        notes.drop(f"{key}/{rank}")
        if within.stop.is_set():
            raise TransportError("joining the group was aborted")
        absent = [other for other in range(own.world_size or 1) if other != rank and not notes.has(f"{key}/{other}")]
        raise within.error(
            f"rank {rank} waited at {notes.address} for "
            f"{ranks_text(absent) if absent else 'the trainer (rank 0)'}, which did not arrive",
            expected="every rank enters at the same time",
            state="no group was formed",
        )
    notes.drop(f"{key}/answer/{token}")
    answer = _read(found[0], _Answer, "the answer of the trainer")
    if answer.error is not None:
        raise _ERRORS.get(str(answer.kind), TransportError)(f"the trainer formed no group: {answer.error}")
    if not rank < len(answer.peers) == (own.world_size or len(answer.peers)):
        raise _malformed("the answer of the trainer", found[0])
    notes.put_at_end(Severance.key(answer.generation), f"rank {rank} ({answer.peers[rank]}) is gone")
    notes.put(f"ready/{answer.generation}/{rank}", True)
    return answer.generation, answer.peers


def _agree(own: Note, rank: int, note: Note) -> None:
    """Raise a ConfigError or ManifestError where a worker expects something else than the trainer."""
    if note.world_size not in (None, own.world_size):
        raise ConfigError(
            f"rank {rank} was given world_size {note.world_size}, the trainer {own.world_size}",
            expected="the same world_size, 1 + the number of workers, on every rank",
        )
    if note.backend != own.backend:
        raise ConfigError(
            f"rank {rank} speaks {note.backend}, the trainer {own.backend}",
            expected="the same backend on every rank",
            hint="give backend= on every rank, or devices of the same kind",
        )
    for name in [*own.settings, *note.settings]:
        mine, theirs = own.settings.get(name), note.settings.get(name)
        if mine != theirs:
            raise ConfigError(
                f"{name} is {_setting(mine)} in the trainer's environment, {_setting(theirs)} in that of rank {rank}",
                expected="the same on every rank: else their communicator hangs, or fails in the middle of an update",
                state="no group was formed",
                hint=f"start the trainer with {name}={theirs or ''}" if theirs else f"start all without {name}",
            )
    mine_rows, their_rows = _metas(0, own), _metas(rank, note)
    for name in [*mine_rows, *their_rows] if mine_rows and their_rows else ():
        if mine_rows.get(name) != their_rows.get(name):
            raise errors.ManifestError(
                f"rank {rank} and the trainer disagree on parameter {name!r}",
                expected=f"the trainer has {mine_rows.get(name)}, rank {rank} {their_rows.get(name)}",
                state="no group was formed",
            )


def _metas(rank: int, note: Note) -> dict[str, ParamMeta]:
    try:
        return {meta.name: meta for meta in map(ParamMeta.from_json, note.params)}
    except errors.ManifestError as error:
        what = f"rank {rank} expects an invalid parameter: {error.what}"
        raise errors.ManifestError(what, expected=error.expected) from error


def _setting(value: str | None) -> str:
    return "not set" if value is None else repr(value)


def _read(found: Any, kind: type[_Struct], what: str) -> _Struct:
    """Return a note as a struct of this kind, or raise a TransportError."""
    try:
        return msgspec.convert(found, kind)
    except (msgspec.ValidationError, UnicodeError) as error:  # the latter of half a surrogate pair
        raise _malformed(what, found) from error


def _malformed(what: str, found: Any) -> TransportError:
    return TransportError(
        f"{what} is {str(found)[:200]!r}",
        expected="a trainer and workers of the same version of torchrl_ext",
        state="no group was formed",
        hint="give each training job a port of its own, and check versions",
    )
