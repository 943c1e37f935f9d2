"""The workers of one trainer, as the trainer sees them, and the messages between them and it.

=========================================  ================================================================
``{"hello": {"rank", "devices"}}``         worker: who it is, and where it can take weights from, best first
``{"welcome": {"session", "segment"}}``    trainer: the handle of the staging buffer on the best of these
``{"turned away": words}``                 trainer: it cannot let this worker in
``{"leaving": words}``                     worker: it cannot take part
``{"announce": info}``                     trainer: a handoff comes (only where no control layer says so)
``{"filled": [handoff, bucket]}``          trainer: that bucket is in the half ``bucket % 2`` of the buffer
``{"taken": [handoff, bucket]}``           worker: its bytes are copied, the half may be filled again
``{"refused": [handoff, words]}``          worker: it takes no more of this handoff
``{"stopped": [handoff, words]}``          trainer: no more of this handoff comes
=========================================  ================================================================

A worker that falls behind its deadline is disconnected before its half is filled again: what it copied of it then, it
cannot acknowledge any more.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from torchrl_ext.errors import DeadlineError, TransportError, WeightSyncError
from torchrl_ext.transports.base import deadline
from torchrl_ext.transports.ipc.host_memory import Segment
from torchrl_ext.transports.links import Link, LocalListener, ranks_text
from torchrl_ext.types import Info

__all__ = ["ConnectedWorkers"]

log = logging.getLogger("torchrl_ext")
_HELLO_S = 2.0
_GRACE_S = 2.0  # for those that still work, after somebody else failed
_LOOK_S = 0.1


class _Worker:
    """The connection to one worker, and how far that is with the handoff."""

    def __init__(self, link: Link, rank: int | None, segment: Segment) -> None:
        self.link, self.rank, self.segment = link, rank, segment
        self.name = link.peer if rank is None else link.peer.replace("a worker", f"rank {rank}", 1)
        self.taken = -1
        self.lost = self.refused = ""

    @property
    def active(self) -> bool:
        return not (self.lost or self.refused)


class ConnectedWorkers:
    """The connections of all workers (trainer end).

    Args:
        address: where workers come in.
        session: names this trainer's connection.
        segment: gives the staging buffer for a worker that can use these devices, best first.
        timeout_s: deadline of every wait, in seconds.
    """

    def __init__(self, address: str, session: str, segment: Callable[[list[str]], Segment], timeout_s: float) -> None:
        self._listener = LocalListener(address)
        self._session, self._segment, self._timeout_s = session, segment, timeout_s
        self._workers: list[_Worker] = []
        self._handoff = -1
        self.aborted = threading.Event()
        """Set from another thread to wait no longer for workers that make no progress."""

    @property
    def alive(self) -> bool:
        """Whether any worker is connected."""
        return any(worker.link.alive for worker in self._workers)

    @property
    def segments(self) -> list[Segment]:
        """The staging buffers of the workers that take part."""
        return list({id(worker.segment): worker.segment for worker in self._active()}.values())

    def wait_for(self, count: int, ranks: Iterable[int] = ()) -> None:
        """Wait until ``count`` workers (and all of ``ranks``) are connected, and let in those that come beyond.

        Raises:
            DeadlineError: they did not come; names the ranks, and why those that came were not let in.
            TransportError: another thread gave up, or there is no memory for the staging buffer.
        """
        until = deadline(self._timeout_s)
        away: dict[str, None] = {}
        while True:
            for worker in self._workers:
                if not worker.link.alive and (words := _farewell(worker.link)):
                    away[f"{worker.name}: {words}"] = None
            self._workers = [worker for worker in self._workers if worker.link.alive]
            absent = set(ranks) - {worker.rank for worker in self._workers}
            waiting = bool(absent) or len(self._workers) < count
            link = self._listener.accept(min(until, deadline(_LOOK_S)) if waiting else 0.0)
            if link is not None:
                try:
                    hello = _hello(link)
                except WeightSyncError as error:
                    log.warning("not let in: %s", error)
                    away[error.what] = None
                    link.close()
                else:
                    self._welcome(link, hello)
            elif not waiting:
                return
            elif self.aborted.is_set():
                raise TransportError("waiting for workers was given up")
            elif time.monotonic() >= until:
                who = ranks_text(absent) if absent else f"{count - len(self._workers)} of {count} workers"
                came = f"; who came and was not let in: {'; '.join(away)}" if away else ""
                raise DeadlineError(
                    f"{who} did not connect within {self._timeout_s:g} s{came}",
                    expected="workers on this machine, of this user",
                    state="nothing was sent",
                    hint="call receive_weights there, or let the engine connect",
                )

    def announce(self, info: Info) -> None:
        """Tell every worker that a handoff comes."""
        for worker in self._workers:
            self._tell(worker, {"announce": info})

    def begin(self, handoff: int) -> None:
        """Begin a handoff, in which every connected worker takes part."""
        self._handoff = handoff
        for worker in self._workers:
            worker.taken, worker.refused = -1, ""
            if not worker.link.alive:  # a link that `_lose` closed says nothing any more
                worker.lost = worker.lost or _farewell(worker.link) or "it is gone"

    def filled(self, bucket: int) -> None:
        """Tell every worker that ``bucket`` is in the staging buffer.

        Raises:
            TransportError: nobody is left who would take it.
        """
        for worker in self._active():
            self._tell(worker, {"filled": [self._handoff, bucket]})
        self._require_somebody()

    def await_taken(self, bucket: int) -> None:
        """Wait until every worker that still takes part has copied ``bucket``.

        Raises:
            TransportError: nobody is left.
        """
        until = deadline(self._timeout_s)
        while late := [worker for worker in self._active() if worker.taken < bucket]:
            if self.aborted.is_set():
                until = min(until, deadline(_GRACE_S))
            if time.monotonic() >= until:
                for worker in late:
                    self._lose(worker, f"it did not take bucket {bucket} in time")
                break
            before = [worker.taken for worker in late]
            self._listen(late, min(until, deadline(_LOOK_S)))
            if before != [worker.taken for worker in late]:
                until = deadline(self._timeout_s)
        self._require_somebody()

    def stop(self, words: str) -> None:
        """Tell the workers that the rest of the handoff does not come."""
        for worker in self._active():
            self._tell(worker, {"stopped": [self._handoff, words]})

    def troubles(self) -> str:
        """Return which workers did not take the handoff, and why; empty when all did."""
        return "; ".join(
            f"{worker.name}: {worker.lost or worker.refused}" for worker in self._workers if not worker.active
        )

    def close(self) -> None:
        """Disconnect all workers, and stop listening. May be called twice."""
        self._listener.close()
        for worker in self._workers:
            worker.link.close()
        self._workers = []

    def _active(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.active]

    def _require_somebody(self) -> None:
        if not self._active():
            raise TransportError(f"no worker is left: {self.troubles() or 'none was connected'}")

    def _welcome(self, link: Link, hello: Info) -> None:
        """Let a worker in, unless it is gone by now.

        Raises:
            TransportError: there is no memory for the staging buffer; the worker is told.
        """
        try:
            segment = self._segment(hello["devices"])
        except WeightSyncError as error:
            _try_to_send(link, {"turned away": error.what})
            link.close()
            raise
        welcome = {"session": self._session, "segment": segment.handle, "timeout_s": self._timeout_s}
        if _try_to_send(link, {"welcome": welcome}):
            self._workers.append(_Worker(link, hello["rank"], segment))

    def _tell(self, worker: _Worker, message: Info) -> None:
        try:
            worker.link.send(message, deadline(self._timeout_s))
        except WeightSyncError as error:
            self._lose(worker, _farewell(worker.link) or error.what)  # who left may have said why

    def _lose(self, worker: _Worker, words: str) -> None:
        worker.lost = words
        worker.link.close()

    def _listen(self, workers: list[_Worker], until: float) -> None:
        """Wait until one of these workers says something, at most until ``until``, and read it."""
        poll = select.poll()
        for worker in workers:
            poll.register(worker.link, select.POLLIN | select.POLLRDHUP)
        ready = {number for number, _ in poll.poll(max(0.0, until - time.monotonic()) * 1e3)}
        for worker in workers:
            if worker.link.fileno() in ready:
                self._hear(worker)

    def _hear(self, worker: _Worker) -> None:
        try:
            while True:
                message = worker.link.read(0.0)
                if message is None:
                    return
                if isinstance(message.get("leaving"), str):
                    return self._lose(worker, message["leaving"])
                kind = "taken" if "taken" in message else "refused"
                said = message.get(kind)
                if not isinstance(said, list) or len(said) != 2 or (kind == "taken" and type(said[1]) is not int):
                    return self._lose(worker, "it answers otherwise than a worker of this library")
                if said[0] == self._handoff and kind == "taken":
                    worker.taken = max(worker.taken, said[1])
                elif said[0] == self._handoff:
                    worker.refused = str(said[1])
        except WeightSyncError as error:
            return self._lose(worker, error.what)


def _hello(link: Link) -> Info:
    """Return the rank and the devices of a worker that connected.

    Raises:
        TransportError: it does not say so.
        WeightSyncError: it is gone, or does not follow the protocol.
    """
    hello: Any = (link.read(deadline(_HELLO_S)) or {}).get("hello")
    rank = hello.get("rank") if isinstance(hello, dict) else -1
    if (rank is not None and (type(rank) is not int or rank < 0)) or not isinstance(hello.get("devices"), list):
        raise TransportError(f"{link.peer} does not say who it is", expected="a worker of torchrl_ext")
    return {"rank": rank, "devices": hello["devices"]}


def _farewell(link: Link) -> str:
    """Return why a worker that closed its connection could not take part; empty where it does not say."""
    words = ""
    try:
        while (message := link.read(0.0)) is not None:
            words = str(message.get("leaving", words))
    except WeightSyncError:
        return words
    return words


def _try_to_send(link: Link, message: Info) -> bool:
    """Send to a worker that just connected, and return whether it is still there."""
    try:
        link.send(message, deadline(_HELLO_S))
        return True
    except WeightSyncError as error:
        log.info("not let in: %s", error)
        link.close()
        return False
