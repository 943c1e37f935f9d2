"""The workers of one trainer, as the trainer sees them.

A late worker is disconnected before its half is overwritten, so it cannot acknowledge damaged bytes.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Iterable

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import TransportError, WeightSyncError
from torchrl_ext.transports.ipc import messages
from torchrl_ext.transports.ipc.host_memory import Segment
from torchrl_ext.transports.ipc.messages import read, send
from torchrl_ext.transports.links import Link, LocalListener, ranks_text

__all__ = ["ConnectedWorkers"]

log = logging.getLogger("torchrl_ext")
_HELLO_S = 2.0
_GRACE_S = 2.0  # for workers that still copy, after another part of the update failed
_LOOK_S = 0.1
_NO_REASON = "it gave no reason"


class _Worker:
    """The connection to one worker, the last bucket that it has taken, and why it takes no more of this handoff."""

    def __init__(self, link: Link, rank: int | None, segment: Segment) -> None:
        self.link, self.rank, self.segment = link, rank, segment
        self.name = link.peer if rank is None else link.peer.replace("a worker", f"rank {rank}", 1)
        self.taken, self.trouble = -1, ""


class ConnectedWorkers:
    """The connections of all workers (trainer end).

    Args:
        address: where workers come in.
        session: names this trainer's connection.
        segment: gives the staging buffer for a worker that can use these devices, best first.
    """

    def __init__(self, address: str, session: str, segment: Callable[[list[str]], Segment]) -> None:
        self._listener = LocalListener(address)
        self._session, self._segment = session, segment
        self._workers: list[_Worker] = []
        self._handoff = -1

    @property
    def alive(self) -> bool:
        """Whether any worker is connected."""
        return any(worker.link.alive for worker in self._workers)

    @property
    def segments(self) -> list[Segment]:
        """The staging buffers of the workers that take part."""
        return list({id(worker.segment): worker.segment for worker in self._active()}.values())

    def wait_for(self, count: int, within: Deadline, ranks: Iterable[int] = ()) -> None:
        """Wait until ``count`` workers (and all of ``ranks``) are connected, and let in those that come beyond.

        Raises:
            DeadlineError: they did not come; names the ranks, and why those that came were not let in.
            TransportError: another thread gave up, or there is no memory for the staging buffer.
        """
        away: dict[str, None] = {}
        while True:
            for worker in self._workers:
                if not worker.link.alive and (reason := _farewell(worker.link)):
                    away[f"{worker.name}: {reason}"] = None
            self._workers = [worker for worker in self._workers if worker.link.alive]
            absent = set(ranks) - {worker.rank for worker in self._workers}
            waiting = bool(absent) or len(self._workers) < count
            link = self._listener.accept(within.within(_LOOK_S if waiting else 0.0).until)
            if link is not None:
                try:
                    hello = _hello(link)
                except WeightSyncError as error:
                    log.warning("not let in: %s", error)
                    away[error.what] = None
                    link.close()
                else:
                    self._let_in(link, hello)
            elif not waiting:
                return
            elif within.over:
                who = ranks_text(absent) if absent else f"{count - len(self._workers)} of {count} workers"
                raise within.error(
                    f"{who} did not connect" + (f" ({'; '.join(away)})" if away else ""),
                    expected="workers on this machine, of this user",
                    state="nothing was sent",
                    hint="call receive_weights there, or let the engine connect",
                )

    def announce(self, message: messages.Announce, within: Deadline) -> None:
        """Tell every worker that a version comes."""
        for worker in self._workers:
            self._tell(worker, message, within)

    def begin(self, handoff: int) -> None:
        """Begin a handoff, in which every connected worker takes part."""
        self._handoff = handoff
        for worker in self._workers:
            if worker.link.alive:
                worker.taken, worker.trouble = -1, ""
            elif worker.link.fileno() >= 0:  # it left by itself, and may have said why
                self._lose(worker, _farewell(worker.link) or "it is gone")

    def filled(self, bucket: int, within: Deadline) -> None:
        """Tell every worker that ``bucket`` is in the staging buffer.

        Raises:
            TransportError: nobody is left who would take it.
        """
        for worker in self._active():
            self._tell(worker, messages.Filled(handoff=self._handoff, bucket=bucket), within)
        self._require_somebody()

    def await_taken(self, bucket: int, within: Deadline) -> None:
        """Wait until every worker that still takes part has copied ``bucket``.

        The deadline begins anew with each bucket that one of them copies. Where another thread ends the wait, it goes
        on for two seconds, in which they may still copy.

        Raises:
            TransportError: nobody is left.
        """
        left = within.again()
        while late := [worker for worker in self._active() if worker.taken < bucket]:
            if left.stop.is_set():
                left = left.within(_GRACE_S)
            if not left.left_s:
                for worker in late:
                    self._lose(worker, f"it did not take bucket {bucket} in time")
                break
            before = [worker.taken for worker in late]
            self._listen(late, left.within(_LOOK_S))
            if before != [worker.taken for worker in late]:
                left = within.again()
        self._require_somebody()

    def stop(self, words: str, within: Deadline) -> None:
        """Tell the workers that the rest of the handoff does not come."""
        for worker in self._active():
            self._tell(worker, messages.Stopped(handoff=self._handoff, why=words), within)

    def troubles(self) -> str:
        """Return which workers did not take the handoff, and why; empty when all did."""
        return "; ".join(f"{worker.name}: {worker.trouble}" for worker in self._workers if worker.trouble)

    def close(self) -> None:
        """Disconnect all workers, and stop listening. May be called twice."""
        self._listener.close()
        for worker in self._workers:
            worker.link.close()
        self._workers = []

    def _active(self) -> list[_Worker]:
        return [worker for worker in self._workers if not worker.trouble]

    def _require_somebody(self) -> None:
        if not self._active():
            raise TransportError(f"no worker is left: {self.troubles() or 'none was connected'}")

    def _let_in(self, link: Link, hello: messages.Hello) -> None:
        """Let a worker in, unless it is gone by now.

        Raises:
            TransportError: there is no memory for the staging buffer; the worker hears of it.
        """
        try:
            segment = self._segment(hello.devices)
        except WeightSyncError as error:
            _greet(link, messages.TurnedAway(why=error.what))
            link.close()
            raise
        if _greet(link, messages.Welcome(session=self._session, segment=segment.handle)):
            self._workers.append(_Worker(link, hello.rank, segment))

    def _tell(self, worker: _Worker, message: messages.FromTrainer, within: Deadline) -> None:
        try:
            send(worker.link, message, within.again())
        except WeightSyncError as error:
            self._lose(worker, _farewell(worker.link) or error.what)  # who left may have said why

    def _lose(self, worker: _Worker, reason: str) -> None:
        worker.trouble = reason or _NO_REASON
        worker.link.close()

    def _listen(self, workers: list[_Worker], within: Deadline) -> None:
        """Wait until one of these workers sends something, and read it."""
        poll = select.poll()
        for worker in workers:
            poll.register(worker.link, select.POLLIN | select.POLLRDHUP)
        ready = {number for number, _ in poll.poll(within.left_s * 1e3)}
        for worker in workers:
            if worker.link.fileno() in ready:
                self._hear(worker)

    def _hear(self, worker: _Worker) -> None:
        try:
            while (message := read(worker.link, messages.FromWorker, Deadline(0.0))) is not None:
                if isinstance(message, messages.Leaving):
                    return self._lose(worker, message.why)
                if isinstance(message, messages.Taken) and message.handoff == self._handoff:
                    worker.taken = max(worker.taken, message.bucket)
                if isinstance(message, messages.Refused) and message.handoff == self._handoff:
                    worker.trouble = message.why or _NO_REASON
        except WeightSyncError as error:
            return self._lose(worker, error.what)


def _hello(link: Link) -> messages.Hello:
    """Return the message of a worker that connected.

    Raises:
        TransportError: it does not say who it is.
        WeightSyncError: it is gone, or does not follow the protocol.
    """
    hello = read(link, messages.FromWorker, Deadline(_HELLO_S))
    if not isinstance(hello, messages.Hello):
        raise TransportError(f"{link.peer} does not say who it is", expected="a worker of torchrl_ext")
    return hello


def _farewell(link: Link) -> str:
    """Return why a worker that closed its connection could not take part; empty where it does not say."""
    reason = ""
    try:
        while (message := read(link, messages.FromWorker, Deadline(0.0))) is not None:
            reason = message.why if isinstance(message, messages.Leaving) else reason
    except WeightSyncError:
        return reason
    return reason


def _greet(link: Link, message: messages.Welcome | messages.TurnedAway) -> bool:
    """Send to a worker that just connected, and return whether it is still there."""
    try:
        send(link, message, Deadline(_HELLO_S))
        return True
    except WeightSyncError as error:
        log.info("not let in: %s", error)
        link.close()
        return False
