"""Where the ranks of a group meet: a `TCPStore` that the trainer (rank 0) hosts, with JSON notes in it.

`host` and `enter` let ranks find each other and agree before a group is formed; whoever does not come is named.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchrl_ext import errors
from torchrl_ext.errors import ConfigError, DeadlineError, NotConnectedError, TransportError
from torchrl_ext.transports.sockets import endpoint, limit_waits

__all__ = ["Board", "brief", "enter", "host", "pauses", "process_text", "ranks_text"]

_PART_BYTES = 4 << 20  # TCPStore closes connections that carry more than 8 MiB at once
_PAUSE_S = (0.0005, 0.01)


def ranks_text(ranks: Iterable[int]) -> str:
    """``"rank 2"``, ``"ranks 2, 3"``."""
    listed = sorted(ranks)
    return ("rank " if len(listed) == 1 else "ranks ") + ", ".join(map(str, listed))


def pauses(until: float, stop: threading.Event) -> Iterator[None]:
    """Turns of a loop that asks for something, with growing pauses, until a deadline or ``stop``."""
    pause_s, longest_s = _PAUSE_S
    while not stop.is_set():
        yield
        if time.monotonic() >= until:
            return
        stop.wait(pause_s)
        pause_s = min(pause_s * 1.5, longest_s)


class Board:
    """JSON notes that every rank can read, in the trainer's `TCPStore`.

    Args:
        address, port: of the trainer; port 0 lets the trainer's own board pick a free one.
        host: this is the trainer, which keeps the store.
        timeout_s: how long a worker waits for the trainer to listen, and then for each of its answers, in seconds.
        stop: set by another thread to end every wait.

    Raises:
        DeadlineError: no trainer listens at the address.
        TransportError: the port is taken.
    """

    def __init__(self, address: str, port: int, *, host: bool, timeout_s: float, stop: threading.Event) -> None:
        until = time.monotonic() + timeout_s
        self.stop = stop
        if not host:
            _await_listener(address, port, until, stop)
        patience = timedelta(seconds=max(1.0, until - time.monotonic()))
        self._server: Any = None
        try:
            if host:  # groups keep clients of the store, so closing the server frees the port whatever they still do
                self._server = dist.TCPStore(address, port, None, True, patience, False)
                port = self._server.port
            self.store = dist.TCPStore(address, port, None, False, patience, False)
        except RuntimeError as error:
            raise TransportError(
                f"the trainer's store at {address}:{port} cannot be {'opened' if host else 'joined'}: {brief(error)}",
                hint="pick another master_port, or 0 for a free one" if host else None,
            ) from error
        self.port = port
        self._gone = ""
        found = [] if host else socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        self._trainer = {endpoint(entry[4]) for entry in found}
        self.limit_waits(timeout_s)
        self.address = f"{address}:{self.port}"

    def limit_waits(self, timeout_s: float) -> None:
        """Worker: how long the trainer may take for an answer from now on."""
        if self._trainer:
            limit_waits(self._trainer, timeout_s)

    def close(self) -> None:
        """Trainer: end the store. May be called twice."""
        self._server = None

    def put(self, key: str, value: Any) -> None:
        """Write a note."""
        body = zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)
        parts = [body[at : at + _PART_BYTES] for at in range(0, len(body), _PART_BYTES)]
        with self._trainer_alive():
            for index, part in enumerate(parts[1:], 1):
                self.store.set(f"{key}#{index}", part)
            self.store.set(key, b"%d:" % len(parts) + parts[0])

    def get(self, key: str) -> Any:
        """Read a note that is known to be there."""
        with self._trainer_alive():
            count, _, body = bytes(self.store.get(key)).partition(b":")
            for index in range(1, int(count)):
                body += bytes(self.store.get(f"{key}#{index}"))
        return json.loads(zlib.decompress(body))

    def take(self, key: str) -> Any:
        """`get`, then `drop`."""
        value = self.get(key)
        self.drop(key)
        return value

    def drop(self, key: str) -> None:
        """Remove a note, if it is there."""
        with self._trainer_alive():
            self.store.delete_key(key)

    def has(self, key: str) -> bool:
        """Whether the note is there."""
        with self._trainer_alive():
            return self.store.check([key])

    def missing(self, keys: Sequence[str], until: float) -> list[str]:
        """Wait for notes; those that are still missing at the deadline (or when stopped)."""
        rest = list(keys)
        for _ in pauses(until, self.stop):
            while rest and self.has(rest[0]):
                rest.pop(0)
            if not rest:
                break
        return [key for key in rest if not self.has(key)]

    @contextmanager
    def _trainer_alive(self) -> Iterator[None]:
        try:
            if not self._gone:
                yield
                return
        except RuntimeError as error:
            self._gone = brief(error)  # a late answer would be taken for that to the next question
        raise NotConnectedError(
            f"the trainer (rank 0) at {self.address} is dead, frozen or shut down: {self._gone}",
            state="what was received completely is intact",
            hint="connect again when a trainer is back",
        )


def host(board: Board, room: str, generation: str, own: dict[str, Any], until: float) -> dict[int, dict[str, Any]]:
    """Trainer: wait until every worker stands in ``room``, check what they expect, and let them in.

    Args:
        own: this rank's note, with ``world_size``, ``timeout_s`` and ``params``.

    Returns:
        The workers' notes by rank.

    Raises:
        DeadlineError: names the ranks that never arrived.
        ConfigError, ManifestError: a worker expects another world size, or other parameters.
    """
    workers = range(1, own["world_size"])
    board.put(f"{room}/0", own)
    try:
        absent = [int(key.rpartition("/")[2]) for key in board.missing([f"{room}/{rank}" for rank in workers], until)]
        notes = {rank: board.take(f"{room}/{rank}") for rank in workers if rank not in absent}
        try:
            if board.stop.is_set():
                raise TransportError("forming the group was aborted")
            if absent:
                raise DeadlineError(
                    f"{ranks_text(absent)} of world size {own['world_size']} did not arrive at {board.address} within "
                    f"{own['timeout_s']:g} s",
                    expected="every rank enters at the same time",
                    state="no group was formed",
                    hint="start the missing workers, or mend world_size",
                )
            for rank, note in notes.items():
                _agree(own, rank, note)
        except errors.WeightSyncError as error:
            for note in notes.values():
                board.put(f"{room}/answer/{note['token']}", {"kind": type(error).__name__, "error": str(error)})
            raise
        peers = {0: own["process"], **{rank: note["process"] for rank, note in notes.items()}}
        for note in notes.values():
            board.put(f"{room}/answer/{note['token']}", {"generation": generation, "peers": list(peers.values())})
        _ready(board, generation, workers, peers, until)
        return notes
    finally:
        board.drop(f"{room}/0")


def enter(board: Board, room: str, rank: int, own: dict[str, Any], until: float) -> dict[str, Any]:
    """Worker: stand in ``room`` until the trainer lets everyone in.

    Returns:
        The trainer's answer: ``generation`` and ``peers``.

    Raises:
        DeadlineError: names the ranks that never arrived.
        ConfigError, ManifestError: the trainer expects something else.
    """
    token = uuid.uuid4().hex
    board.put(f"{room}/{rank}", {**own, "token": token})
    if board.missing([f"{room}/answer/{token}"], until):
        board.drop(f"{room}/{rank}")
        if board.stop.is_set():
            raise TransportError("joining the group was aborted")
        others = [other for other in range(own["world_size"] or 1) if other != rank]
        absent = [other for other in others if not board.has(f"{room}/{other}")]
        raise DeadlineError(
            f"rank {rank} waited {own['timeout_s']:g} s at {board.address} for "
            + (f"{ranks_text(absent)}, which did not arrive" if absent else "the trainer (rank 0)"),
            expected="every rank enters at the same time",
            state="no group was formed",
        )
    answer = board.take(f"{room}/answer/{token}")
    if "error" in answer:
        raise getattr(errors, answer["kind"])(f"the trainer formed no group: {answer['error']}")
    board.put(f"ready/{answer['generation']}/{rank}", True)
    return answer


def process_text() -> str:
    """How to call this process in a message."""
    return f"pid {os.getpid()} on {socket.gethostname()}"


def _ready(board: Board, generation: str, workers: range, peers: dict[int, str], until: float) -> None:
    """A rank that died while others were awaited is named here, before a constructor blocks on it."""
    absent = board.missing([f"ready/{generation}/{rank}" for rank in workers], until)
    if board.stop.is_set():
        raise TransportError("forming the group was aborted")
    if absent:
        named = [int(key.rpartition("/")[2]) for key in absent]
        raise DeadlineError(
            f"{ranks_text(named)} ({', '.join(peers[rank] for rank in named)}) arrived but did not answer",
            state="no group was formed",
        )


def _agree(own: dict[str, Any], rank: int, note: dict[str, Any]) -> None:
    """Hold a worker's expectations against the trainer's."""
    if note["world_size"] not in (None, own["world_size"]):
        raise ConfigError(
            f"rank {rank} was given world_size {note['world_size']}, the trainer {own['world_size']}",
            expected="the same world_size, 1 + the number of workers, on every rank",
        )
    mine, theirs = ({row[0]: row for row in side["params"]} for side in (own, note))
    if not mine or not theirs:  # nothing was said about them
        return
    for name in [*mine, *theirs]:
        if mine.get(name) != theirs.get(name):
            raise errors.ManifestError(
                f"rank {rank} and the trainer disagree on parameter {name!r}",
                expected=f"the trainer has {_row(mine.get(name))}, rank {rank} {_row(theirs.get(name))}",
                state="no group was formed",
            )


def _row(row: list[Any] | None) -> str:
    return "none" if row is None else f"{row[1]}{row[2]}"


def _await_listener(address: str, port: int, until: float, stop: threading.Event) -> None:
    """Until somebody listens; TCPStore's own retries can be neither aborted nor kept quiet."""
    began, failure = time.monotonic(), "no attempt was made"
    for _ in pauses(until, stop):
        try:
            socket.create_connection((address, port), timeout=max(0.1, until - time.monotonic())).close()
            return
        except OSError as error:
            failure = str(error)
    if stop.is_set():
        raise TransportError("joining the trainer was aborted")
    raise DeadlineError(
        f"no trainer (rank 0) listens at {address}:{port} after {time.monotonic() - began:.1f} s: {failure}",
        expected="the trainer calls init_all_workers_group (or open) at the same time",
        hint="check master_address and master_port",
    )


def brief(error: BaseException) -> str:
    """torch's messages without their stack."""
    return str(error).split("\n")[0].split(" This is typically caused")[0]
