"""Where the ranks of a group meet: they find each other in the trainer's notes, and agree before a group is formed.

Ranks that do not come are named. Notes come from other processes, so each is checked before it is used.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import NoneType
from typing import Any, ClassVar, cast

import torch

from torchrl_ext import errors
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError, DeadlineError, NotConnectedError, TransportError
from torchrl_ext.transports.base import deadline
from torchrl_ext.transports.group.handoffs import Announcements, await_others, tell_stopped
from torchrl_ext.transports.group.notes import KeptNotes, NoteStore, RemoteNotes
from torchrl_ext.transports.group.peers import Carrier
from torchrl_ext.transports.group.process_group import Group
from torchrl_ext.transports.links import ranks_text
from torchrl_ext.types import ParamMeta

__all__ = ["LOBBY", "Membership", "Note", "enter", "host"]

LOBBY = "lobby"
"""The room in which ranks meet without a control layer."""

_SETTINGS = {"nccl": ("NCCL_CUMEM_ENABLE", "NCCL_CUMEM_HOST_ENABLE")}
"""Environment variables, by backend, that must be the same on all ranks of a communicator; engines set some for
themselves (vLLM sets ``NCCL_CUMEM_ENABLE=0``)."""

_ERRORS: Mapping[str, type[errors.WeightSyncError]] = {
    kind.__name__: kind
    for kind in (errors.ConfigError, errors.ManifestError, errors.DeadlineError, errors.TransportError)
}
"""The errors that a trainer may report to workers, by name."""

_AGAIN = "call init_all_workers_group on every rank at the same time, or connect through a sender"


class Membership:
    """Forms the groups of one rank, one after the other, and ends them.

    Args:
        address, port: where workers reach the trainer's notes.
        secret: what trainer and workers know; "" lets in whoever finds the port, unless a control layer passes on one
            that the trainer makes.
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
        self._carrier: Carrier | None = None
        self._announcements: Announcements | None = None
        self._generations = 0

    def under(self, within: Deadline) -> None:
        """End every wait of the next step, here and in the group, when ``within`` is stopped."""
        self.stop = within.stop
        if self._notes is not None:
            self._notes.stop = within.stop
        if self._carrier is not None:
            self._carrier.under(within.stop)

    @property
    def connected(self) -> bool:
        """Whether there is a group that can be used."""
        return self._carrier is not None and self._carrier.alive

    def carrier(self) -> Carrier:
        """Return the current group.

        Raises:
            NotConnectedError: there is none, or it was closed.
        """
        if self._carrier is None or not self._carrier.alive:
            closed = "" if self._carrier is None else ": its group was closed after a failure"
            raise NotConnectedError(f"this end of the collective transport is not connected{closed}", hint=_AGAIN)
        return self._carrier

    def group(self) -> Group:
        """As `carrier`, of a gloo or NCCL group, which can broadcast."""
        return cast(Group, self.carrier())

    def announcements(self) -> Announcements:
        """Return this rank's place in the announcements to the current group; errors as `carrier`."""
        group = self.carrier()
        if self._announcements is None or self._announcements.group is not group:
            self._announcements = Announcements(group)
        return self._announcements

    def notes(self, room: str) -> NoteStore:
        """Return the notes that the trainer hosts, for the ranks that meet in ``room`` (trainer end).

        Raises:
            TransportError: the port is taken.
        """
        secret = self._secret if room == LOBBY else self._private
        if self._notes is not None and self._notes.secret != secret:
            self._end_notes()
        return self._notes or self._keep(KeptNotes(self.address, self.port, secret, self.stop))

    def host(self, room: str, size: int, params: tuple[ParamMeta, ...]) -> None:
        """Form the next group with the workers that wait in ``room`` (trainer end).

        Raises:
            DeadlineError, ConfigError, ManifestError: as `host`.
            TransportError: connections could not be made.
        """
        self.leave()
        notes = self.notes(room)
        self._generations += 1
        generation = str(self._generations)
        peers = host(notes, room, generation, self._own_note(size, params), deadline(self.timeout_s))
        self._form(notes, generation, 0, peers)

    def enter(self, room: str, rank: int, size: int | None, params: tuple[ParamMeta, ...]) -> None:
        """Join the group that the trainer forms with the workers in ``room`` (worker end).

        Raises:
            DeadlineError, ConfigError, ManifestError: as `enter`.
            TransportError: connections could not be made.
        """
        self.leave()
        self._end_notes()
        until = deadline(self.timeout_s)
        notes = self._keep(RemoteNotes(self.address, self.port, self._secret, self.stop, timeout_s=self.timeout_s))
        generation, peers = enter(notes, room, rank, self._own_note(size, params), until)
        self._form(notes, generation, rank, dict(enumerate(peers)))

    def leave(self) -> None:
        """End the group, if there is one."""
        group, self._carrier = self._carrier, None
        if group is not None:
            if group.rank == 0 and group.alive:
                tell_stopped(group, "the trainer shut it down or forms a new one")
            group.sever()
            own = (f"{kind}/{group.generation}/" for kind in ("announced", "arrived", "over"))
            group.notes.sweep(*own)

    def abort(self) -> None:
        """End every wait, from another thread; the group is lost."""
        self.stop.set()
        if (carrier := self._carrier) is not None:
            carrier.sever()

    def close(self) -> None:
        """Leave the group, a worker once the others have what it has, and close the notes. May be called twice."""
        if self._carrier is not None and self._carrier.acknowledged:
            await_others(self._carrier)
        self.stop.set()
        self.leave()
        self._end_notes()

    def _form(self, notes: NoteStore, generation: str, rank: int, peers: dict[int, str]) -> None:
        how: dict[str, Any] = {"device": self.device, "timeout_s": self.timeout_s}
        try:
            if self.backend == "nixl":
                from torchrl_ext.transports.sharded.nixl import NixlGroup

                self._carrier = NixlGroup(notes, generation, rank, peers, **how)
            else:
                self._carrier = Group(notes, generation, rank, peers, backend=self.backend, **how)
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


@dataclass(frozen=True, kw_only=True)
class Note:
    """A rank's description of itself, from which the trainer sees whether all ranks agree.

    Attributes:
        world_size: what it was given; None leaves that to the trainer.
        timeout_s: deadline of its waits, in seconds.
        process: how to call its process in a message.
        params: what it expects to be moved, `ParamMeta.to_json` of each; empty where it expects nothing particular.
        backend: ``"gloo"``, ``"nccl"`` or ``"nixl"``.
        settings: variables of its environment on which ranks must agree, and None for those that are not set.
        token: names the note in which the trainer answers.
    """

    world_size: int | None
    timeout_s: float
    process: str
    params: list[Any]
    backend: str
    settings: dict[str, str | None]
    token: str = ""

    _KINDS: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "world_size": (int, NoneType),
        "timeout_s": (int, float),
        "process": (str,),
        "params": (list,),
        "backend": (str,),
        "settings": (dict,),
        "token": (str,),
    }

    @classmethod
    def from_json(cls, rank: int, read: Any) -> Note:
        """Return the note that was read from ``rank``, checked.

        Raises:
            TransportError: it is no such note.
            ManifestError: it lists what is no parameter.
        """
        try:
            note = cls(**{field: _of(read, field, *kinds) for field, kinds in cls._KINDS.items()})
            for row in note.params:
                ParamMeta.from_json(row)
        except errors.WeightSyncError as error:
            raise type(error)(f"rank {rank} says what cannot be: {error.what}", expected=error.expected) from error
        return note


def host(notes: NoteStore, room: str, generation: str, own: Note, until: float) -> dict[int, str]:
    """Wait until every worker is in ``room``, check what they expect, and let them in (trainer end).

    Args:
        own: this rank's note, with a ``world_size``.

    Returns:
        How to call the process of each rank, this one included.

    Raises:
        DeadlineError: names the ranks that never arrived.
        ConfigError, ManifestError: a worker expects another world size, or other parameters.
        TransportError: what a worker says cannot be read.
    """
    size = own.world_size or 1
    workers = range(1, size)
    notes.put(f"{room}/0", asdict(own))
    try:
        said = notes.collect(f"{room}/", workers, until)
        absent = [rank for rank in workers if rank not in said]
        tokens = [read.get("token") for read in said.values() if type(read) is dict]
        answers = [f"{room}/answer/{token}" for token in tokens if type(token) is str]
        for rank in said:
            notes.drop(f"{room}/{rank}")
        try:
            if notes.stop.is_set():
                raise TransportError("forming the group was aborted")
            if absent:
                raise DeadlineError(
                    f"{ranks_text(absent)} of world size {size} did not arrive at {notes.address} within "
                    f"{own.timeout_s:g} s",
                    expected="every rank enters at the same time",
                    state="no group was formed",
                    hint="start the missing workers, or mend world_size",
                )
            told = {rank: Note.from_json(rank, read) for rank, read in said.items()}
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
        ready = notes.collect(f"ready/{generation}/", workers, until)
        if notes.stop.is_set():
            raise TransportError("forming the group was aborted")
        absent = [rank for rank in workers if rank not in ready]
        if absent:
            raise DeadlineError(
                f"{ranks_text(absent)} ({', '.join(peers[rank] for rank in absent)}) arrived but did not answer",
                state="no group was formed",
            )
        return peers
    finally:
        notes.drop(f"{room}/0")


def enter(notes: NoteStore, room: str, rank: int, own: Note, until: float) -> tuple[str, list[str]]:
    """Leave this rank's note in ``room``, and wait until the trainer lets everyone in (worker end).

    Returns:
        The generation of the group that is formed now, and how to call the process of each rank, from 0 on.

    Raises:
        DeadlineError: names the ranks that never arrived.
        ConfigError, ManifestError: the trainer expects something else.
        TransportError: what the trainer says cannot be read.
    """
    answer = f"{room}/answer/{uuid.uuid4().hex}"
    notes.put(f"{room}/{rank}", asdict(replace(own, token=answer.rpartition("/")[2])))
    found = notes.wait(answer, until)
    if not found:
        notes.drop(f"{room}/{rank}")
        if notes.stop.is_set():
            raise TransportError("joining the group was aborted")
        others = [other for other in range(own.world_size or 1) if other != rank]
        absent = [other for other in others if not notes.has(f"{room}/{other}")]
        raise DeadlineError(
            f"rank {rank} waited {own.timeout_s:g} s at {notes.address} for "
            + (f"{ranks_text(absent)}, which did not arrive" if absent else "the trainer (rank 0)"),
            expected="every rank enters at the same time",
            state="no group was formed",
        )
    notes.drop(answer)
    if type(found[0]) is dict and "error" in found[0]:
        kind = _ERRORS.get(str(found[0].get("kind")), TransportError)
        raise kind(f"the trainer formed no group: {_of(found[0], 'error', str)}")
    generation, peers = _of(found[0], "generation", str), _of(found[0], "peers", list)
    if not all(type(peer) is str for peer in peers) or not rank < len(peers) == (own.world_size or len(peers)):
        raise _malformed("the answer of the trainer", found[0])
    notes.put(f"ready/{generation}/{rank}", True)
    return generation, peers


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
    mine_rows, their_rows = ({row[0]: list(row) for row in side.params} for side in (own, note))
    if not mine_rows or not their_rows:  # nothing was said about them
        return
    for name in [*mine_rows, *their_rows]:
        if mine_rows.get(name) != their_rows.get(name):
            raise errors.ManifestError(
                f"rank {rank} and the trainer disagree on parameter {name!r}",
                expected=f"the trainer has {_row(mine_rows.get(name))}, rank {rank} {_row(their_rows.get(name))}",
                state="no group was formed",
            )


def _setting(value: str | None) -> str:
    return "not set" if value is None else repr(value)


def _row(row: list[Any] | None) -> str:
    return "none" if row is None else f"{row[1]}{row[2]}"


def _of(said: Any, field: str, *kinds: type) -> Any:
    """Return one field of a note, which has exactly one of these types (JSON has no subtypes)."""
    value = said.get(field) if type(said) is dict else None
    if type(said) is not dict or type(value) not in kinds:
        raise _malformed(f"{field} of a note", value)
    return value


def _malformed(what: str, found: Any) -> TransportError:
    return TransportError(
        f"{what} is {str(found)[:200]!r}",
        expected="a trainer and workers of the same version of torchrl_ext",
        state="no group was formed",
        hint="give each training job a port of its own, and check versions",
    )
