"""How the ranks of a group find each other in its notes (`host` and `enter`) and agree before a group is formed.

Whoever does not come is named. What a note says is somebody else's word: it is checked before it is used.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torchrl_ext import errors
from torchrl_ext.errors import ConfigError, DeadlineError, TransportError
from torchrl_ext.transports.collective.notes import NoteStore
from torchrl_ext.types import ParamMeta

__all__ = ["Admission", "Note", "enter", "host", "process_text", "ranks_text"]

_KINDS: Mapping[str, type[errors.WeightSyncError]] = {
    kind.__name__: kind
    for kind in (errors.ConfigError, errors.ManifestError, errors.DeadlineError, errors.TransportError)
}
"""What a trainer may say that went wrong."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """What a rank says of itself.

    Attributes:
        world_size: what it was given; None leaves that to the trainer.
        timeout_s: deadline of its waits, in seconds.
        process: how to call its process in a message.
        params: what it expects to be moved, `ParamMeta.to_json` of each; empty says nothing.
        backend: ``"gloo"`` or ``"nccl"``.
        settings: variables of its environment on which ranks must agree, and None for those that are not set.
        token: names the answer to it.
    """

    world_size: int | None
    timeout_s: float
    process: str
    params: list[Any]
    backend: str
    settings: dict[str, str | None]
    token: str = ""

    @classmethod
    def from_json(cls, found: Any) -> Note:
        """What was read, checked.

        Raises:
            TransportError: it is no such note.
            ManifestError: it lists what is no parameter.
        """
        said = _fields(found, "a note of a rank")
        note = cls(
            world_size=_of(said, "world_size", int, None),
            timeout_s=float(_of(said, "timeout_s", int, float)),
            process=_of(said, "process", str),
            params=_of(said, "params", list),
            backend=_of(said, "backend", str),
            settings=_of(said, "settings", dict),
            token=_of(said, "token", str),
        )
        for row in note.params:
            ParamMeta.from_json(row)
        return note


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What the trainer answers.

    Attributes:
        generation: of the group that is formed now.
        peers: how to call the process of each rank, from 0 on.
    """

    generation: str
    peers: list[str]

    @classmethod
    def from_json(cls, found: Any) -> Admission:
        """What was read, checked; an answer that says why there is no group is raised.

        Raises:
            TransportError: it is no such answer.
            ConfigError, ManifestError, DeadlineError: what the trainer says.
        """
        said = _fields(found, "the answer of the trainer")
        if "error" in said:
            kind = _KINDS.get(str(said.get("kind")), TransportError)
            raise kind(f"the trainer formed no group: {_of(said, 'error', str)}")
        answer = cls(generation=_of(said, "generation", str), peers=_of(said, "peers", list))
        if not all(type(peer) is str for peer in answer.peers):
            raise _malformed("the answer of the trainer", found)
        return answer


def ranks_text(ranks: Iterable[int]) -> str:
    """``"rank 2"``, ``"ranks 2, 3"``."""
    listed = sorted(ranks)
    return ("rank " if len(listed) == 1 else "ranks ") + ", ".join(map(str, listed))


def host(notes: NoteStore, room: str, generation: str, own: Note, until: float) -> dict[int, str]:
    """Trainer: wait until every worker stands in ``room``, check what they expect, and let them in.

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
            told = {rank: _told_by(rank, read) for rank, read in said.items()}
            for rank, note in told.items():
                _agree(own, rank, note)
        except errors.WeightSyncError as error:
            kind = next((name for name, kind in _KINDS.items() if type(error) is kind), "TransportError")
            for answer in answers:
                notes.put(answer, {"kind": kind, "error": str(error)})
            raise
        peers = {0: own.process, **{rank: note.process for rank, note in told.items()}}
        admission = asdict(Admission(generation=generation, peers=list(peers.values())))
        for answer in answers:
            notes.put(answer, admission)
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


def enter(notes: NoteStore, room: str, rank: int, own: Note, until: float) -> Admission:
    """Worker: stand in ``room`` until the trainer lets everyone in.

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
    admission = Admission.from_json(found[0])
    if not rank < len(admission.peers) == (own.world_size or len(admission.peers)):
        raise _malformed("the answer of the trainer", found[0])
    notes.put(f"ready/{admission.generation}/{rank}", True)
    return admission


def process_text() -> str:
    """How to call this process in a message."""
    return f"pid {os.getpid()} on {socket.gethostname()}"


def _told_by(rank: int, read: Any) -> Note:
    try:
        return Note.from_json(read)
    except errors.WeightSyncError as error:
        raise type(error)(f"rank {rank} says what cannot be: {error.what}", expected=error.expected) from error


def _agree(own: Note, rank: int, note: Note) -> None:
    """Hold a worker's expectations against the trainer's."""
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


def _fields(found: Any, what: str) -> dict[str, Any]:
    if type(found) is not dict:
        raise _malformed(what, found)
    return found


def _of(said: dict[str, Any], field: str, *kinds: type | None) -> Any:
    """One field, of one of these types exactly (JSON knows no others); None for what may be null."""
    value = said.get(field)
    if not (type(value) in kinds or (value is None and None in kinds)):
        raise _malformed(f"{field} of a note", value)
    return value


def _malformed(what: str, found: Any) -> TransportError:
    return TransportError(
        f"{what} is {str(found)[:200]!r}",
        expected="a trainer and workers of the same version of torchrl_ext",
        state="no group was formed",
        hint="give each training job a port of its own, and check versions",
    )
