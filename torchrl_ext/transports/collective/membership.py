"""A process's place in the collective: where it meets the others, and the group it is in now."""

from __future__ import annotations

import os
import threading
import uuid
import weakref

import torch

from torchrl_ext.errors import DeadlineError, NotConnectedError, TransportError
from torchrl_ext.transports.base import deadline
from torchrl_ext.transports.collective.group import Group
from torchrl_ext.transports.collective.handoffs import tell_stopped
from torchrl_ext.transports.collective.notes import KeptNotes, NoteStore, RemoteNotes
from torchrl_ext.transports.collective.rendezvous import Note, enter, host, process_text
from torchrl_ext.types import Info, ParamMeta

__all__ = ["LOBBY", "Membership"]

LOBBY = "lobby"
"""Where those meet that no control layer brings together."""

_SETTINGS = {"nccl": ("NCCL_CUMEM_ENABLE", "NCCL_CUMEM_HOST_ENABLE")}
"""Variables of the environment that make ranks of one communicator speak differently; engines set some for themselves
(vLLM sets ``NCCL_CUMEM_ENABLE=0``)."""

_AGAIN = "call init_all_workers_group on every rank at the same time, or connect through a sender"


class Membership:
    """Forms groups, one after the other, and ends them.

    Args:
        address, port: where workers reach the trainer's notes.
        secret: what trainer and workers know; "" lets in whoever finds the port, unless a control layer passes on one
            that the trainer makes.
        device, backend: of the groups.
        timeout_s: deadline of every wait, in seconds.
    """

    def __init__(
        self, address: str, port: int, *, secret: str, device: torch.device, backend: str, timeout_s: float
    ) -> None:
        self.address, self.port, self.device, self.backend = address, port, device, backend
        self.timeout_s = timeout_s
        self._secret, self._private = secret, secret or uuid.uuid4().hex
        self.stop = threading.Event()
        self._notes: NoteStore | None = None
        self._group: Group | None = None
        self._generations = 0

    @property
    def connected(self) -> bool:
        """Whether there is a group that can be used."""
        return self._group is not None and self._group.alive

    def group(self) -> Group:
        """The group of now.

        Raises:
            NotConnectedError: there is none, or it was closed.
        """
        if self._group is None or not self._group.alive:
            closed = "" if self._group is None else ": its group was closed after a failure"
            raise NotConnectedError(f"this end of the collective transport is not connected{closed}", hint=_AGAIN)
        return self._group

    def notes(self, room: str) -> NoteStore:
        """Trainer: the notes that it hosts, for those who meet in ``room``.

        Raises:
            TransportError: the port is taken.
        """
        secret = self._secret if room == LOBBY else self._private
        if self._notes is not None and self._notes.secret != secret:
            self._notes.close()
            self._notes = None
        return self._notes or self._keep(KeptNotes(self.address, self.port, secret, self.stop))

    def address_info(self, room: str) -> Info:
        """Trainer: what a worker needs to reach its notes, and to speak the same backend."""
        notes = self.notes(room)
        return {
            "master_address": self.address,
            "master_port": notes.port,
            "secret": notes.secret,
            "backend": self.backend,
            "timeout_s": self.timeout_s,
        }

    def host(self, room: str, size: int, params: tuple[ParamMeta, ...]) -> None:
        """Trainer: form the next group with the workers that stand in ``room``.

        Raises:
            DeadlineError, ConfigError, ManifestError: as `rendezvous.host`.
            TransportError: connections could not be made.
        """
        self.leave(0)
        notes = self.notes(room)
        self._generations += 1
        generation = str(self._generations)
        peers = host(notes, room, generation, self._own_note(size, params), deadline(self.timeout_s))
        self._form(notes, generation, 0, peers)

    def enter(self, room: str, rank: int, size: int | None, params: tuple[ParamMeta, ...]) -> None:
        """Worker: join the group that the trainer forms with those in ``room``.

        Raises:
            DeadlineError, ConfigError, ManifestError: as `rendezvous.enter`.
            TransportError: connections could not be made.
        """
        self.leave(rank)
        if self._notes is not None:
            self._notes.close()
        until = deadline(self.timeout_s)
        notes = self._keep(RemoteNotes(self.address, self.port, self._secret, self.stop, timeout_s=self.timeout_s))
        admission = enter(notes, room, rank, self._own_note(size, params), until)
        self._form(notes, admission.generation, rank, dict(enumerate(admission.peers)))

    def leave(self, rank: int) -> None:
        """End the group, if there is one."""
        group, self._group = self._group, None
        if group is None:
            return
        if rank == 0 and group.alive:
            tell_stopped(group, "the trainer shut it down or forms a new one")
        group.sever()
        if rank == 0:
            group.notes.sweep(f"announced/{group.generation}/", f"arrived/{group.generation}/")

    def abort(self) -> None:
        """End every wait, from another thread; the group is lost."""
        self.stop.set()
        group = self._group
        if group is not None:
            group.sever()

    def close(self, rank: int) -> None:
        """Leave, and close the notes. May be called twice."""
        self.stop.set()
        self.leave(rank)
        if self._notes is not None:
            self._notes.close()
            self._notes = None

    def _form(self, notes: NoteStore, generation: str, rank: int, peers: dict[int, str]) -> None:
        try:
            self._group = Group(
                notes, generation, rank, peers, device=self.device, backend=self.backend, timeout_s=self.timeout_s
            )
        except (TransportError, DeadlineError) as error:
            raise type(error)(
                f"rank {rank} could not form a {self.backend} group of {len(peers)}: {error.what}",
                expected=f"connections to {', '.join(f'rank {r} ({p})' for r, p in peers.items() if r != rank)}",
                state="no group was formed",
            ) from error

    def _keep(self, notes: NoteStore) -> NoteStore:
        self._notes = notes
        # at the end of a process its connections close by themselves: those of a fork would end its parent's
        weakref.finalize(self, notes.close).atexit = False
        return notes

    def _own_note(self, size: int | None, params: tuple[ParamMeta, ...]) -> Note:
        return Note(
            world_size=size,
            timeout_s=self.timeout_s,
            process=process_text(),
            params=[meta.to_json() for meta in params],
            backend=self.backend,
            settings={name: os.environ.get(name) for name in _SETTINGS.get(self.backend, ())},
        )
