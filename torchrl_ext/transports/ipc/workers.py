"""The workers of one trainer, as the trainer sees them.

A late worker is disconnected before its half is overwritten, so it cannot acknowledge damaged bytes.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Iterable
from contextlib import suppress

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import TransportError, WeightSyncError
from torchrl_ext.transports.ipc.memory import Segment
from torchrl_ext.transports.ipc.messages import Done, GivenUp, Hello, Message, Welcome, read, send
from torchrl_ext.transports.links import Link, LocalListener, ranks_text

__all__ = ["ConnectedWorkers"]

log = logging.getLogger("torchrl_ext")
_HELLO_S = 2.0
_GRACE_S = 2.0  # for workers that still copy, after another part of the update failed
_LOOK_S = 0.1


class _Worker:
    """The connection to one worker, the last bucket that it has taken, and why it takes no more of the handoff."""

    def __init__(self, link: Link, rank: int | None, segment: Segment) -> None:
        self.link, self.rank, self.segment = link, rank, segment
        self.name = link.peer if rank is None else link.peer.replace("a worker", f"rank {rank}", 1)
        self.handoff, self.taken, self.trouble = -1, -1, ""

    def begin(self, handoff: int) -> None:
        """Take part in a handoff, or say why not."""
        self.handoff, self.taken = handoff, -1
        if self.link.alive:
            self.trouble = ""
        else:
            self.hear()

    def tell(self, message: Message, within: Deadline) -> None:
        """Send a message to the worker, which is lost where it does not take it."""
        try:
            send(self.link, message, within.again())
        except WeightSyncError as error:
            self.hear()  # a worker that left may have said why
            self.lose(error.what)

    def hear(self, bucket: int | None = None) -> None:
        """Read all that the worker has sent, or until it has taken ``bucket``: it may leave after the last one."""
        try:
            while (bucket is None or self.taken < bucket) and (message := read(self.link, Deadline(0.0))) is not None:
                if isinstance(message, Done) and message.handoff == self.handoff:
                    self.taken = max(self.taken, message.bucket)
                elif isinstance(message, GivenUp) and message.handoff is None:
                    self.lose(message.why)
                elif isinstance(message, GivenUp) and message.handoff == self.handoff:
                    self.trouble = message.why or "it gave no reason"
        except WeightSyncError as error:
            self.lose(error.what)

    def lose(self, why: str) -> None:
        """Disconnect the worker, unless it was lost before."""
        self.trouble = self.trouble or why or "it gave no reason"
        self.link.close()


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
            for worker in [worker for worker in self._workers if not worker.link.alive]:
                worker.hear()  # it may have said why it left
                away[f"{worker.name}: {worker.trouble}"] = None
                self._workers.remove(worker)
            absent = set(ranks) - {worker.rank for worker in self._workers}
            waiting = bool(absent) or len(self._workers) < count
            link = self._listener.accept(within.within(_LOOK_S if waiting else 0.0))
            if link is not None:
                try:
                    hello = _hello(link, within.within(_HELLO_S))
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
                    expected="workers on this machine, of this user and this release of torchrl_ext",
                    state="nothing was sent",
                    hint="call receive_weights there, or let the engine connect",
                )

    def begin(self, handoff: int) -> None:
        """Begin a handoff, in which every connected worker takes part."""
        for worker in self._workers:
            worker.begin(handoff)

    def tell(self, message: Message, within: Deadline) -> None:
        """Send a message to every worker that takes part in the handoff."""
        for worker in self._active():
            worker.tell(message, within)

    def await_taken(self, bucket: int, within: Deadline) -> None:
        """Wait until every worker that still takes part has copied ``bucket``.

        The deadline begins anew with each bucket that one of them copies. Where another thread ends the wait, it goes
        on for two seconds, in which they may still copy.

        Raises:
            TransportError: nobody is left.
        """
        left, taken = within, list[int]()
        while late := self._late(bucket):
            if taken != (taken := [worker.taken for worker in late]):
                left = within.again()
            if left.stop.is_set():
                left = left.within(_GRACE_S)
            if not left.left_s:
                for worker in late:
                    worker.lose(f"it did not take bucket {bucket} in time")
                break
            _await_word(late, left.within(_LOOK_S))
        if not self._active():
            raise TransportError(f"no worker remains: {self.troubles() or 'none was connected'}")

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

    def _late(self, bucket: int) -> list[_Worker]:
        """Return the workers that have not taken ``bucket`` yet, by all that they sent."""
        for worker in self._active():
            worker.hear(bucket)
        return [worker for worker in self._active() if worker.taken < bucket]

    def _let_in(self, link: Link, hello: Hello) -> None:
        """Let a worker in.

        Raises:
            TransportError: there is no memory for the staging buffer; the worker hears of it.
        """
        try:
            worker = _Worker(link, hello.rank, self._segment(hello.devices))
        except WeightSyncError as error:
            with suppress(WeightSyncError):  # it may be gone by now
                send(link, GivenUp(why=error.what), Deadline(_HELLO_S))
            link.close()
            raise
        worker.tell(Welcome(session=self._session, segment=worker.segment.handle), Deadline(_HELLO_S))
        self._workers.append(worker)


def _await_word(workers: list[_Worker], within: Deadline) -> None:
    """Wait until one of these workers sends something."""
    poll = select.poll()
    for worker in workers:
        poll.register(worker.link, select.POLLIN | select.POLLRDHUP)
    poll.poll(within.left_s * 1e3)


def _hello(link: Link, within: Deadline) -> Hello:
    """Return the message of a worker that connected.

    Raises:
        TransportError: it does not identify itself.
        WeightSyncError: it is gone, or does not follow the protocol.
    """
    hello = read(link, within)
    if not isinstance(hello, Hello):
        raise TransportError(f"{link.peer} does not identify itself", expected="a worker of torchrl_ext")
    return hello
