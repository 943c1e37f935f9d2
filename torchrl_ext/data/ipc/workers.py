"""The workers of one trainer, as the trainer sees them.

A failure of one ends the connections of all, so that none can acknowledge bytes of a half that is overwritten.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Iterable
from contextlib import suppress

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import TransportError, WeightSyncError
from torchrl_ext.data.group.links import Link, LocalListener, ranks_text
from torchrl_ext.data.ipc.memory import SharedSegment
from torchrl_ext.data.ipc.messages import Done, Hello, IPCMessage, Welcome, read, send

__all__ = ["ConnectedWorkers"]

log = logging.getLogger("torchrl_ext")
_HELLO_S = 2.0
_LOOK_S = 0.1


class _Worker:
    """The connection to one worker, and the last bucket that it has taken of a handoff."""

    def __init__(self, link: Link, rank: int | None, segment: SharedSegment) -> None:
        self.link, self.rank, self.segment = link, rank, segment
        if rank is not None:
            link.peer = link.peer.replace("a worker", f"rank {rank}", 1)
        self.handoff, self.taken = -1, -1

    def hear(self, bucket: int) -> int:
        """Read what the worker has sent, until it has taken ``bucket`` (it may leave then); return what it has taken.

        Raises:
            NotConnectedError: it is gone.
            TransportError, IntegrityError: it does not follow the protocol.
        """
        while self.taken < bucket and (message := read(self.link, Deadline(0.0))) is not None:
            if isinstance(message, Done) and message.handoff == self.handoff:
                self.taken = max(self.taken, message.bucket)
        return self.taken


class ConnectedWorkers:
    """The connections of all workers (trainer end).

    Args:
        address: where workers come in.
        session: names this trainer's connection.
        segment: gives the staging buffer for a worker that can use these devices, best first.
    """

    def __init__(self, address: str, session: str, segment: Callable[[list[str]], SharedSegment]) -> None:
        self._listener = LocalListener(address)
        self._session, self._segment = session, segment
        self._workers: list[_Worker] = []

    @property
    def alive(self) -> bool:
        """Whether any worker is connected."""
        return any(worker.link.alive for worker in self._workers)

    @property
    def segments(self) -> list[SharedSegment]:
        """The staging buffers of the workers."""
        return list({id(worker.segment): worker.segment for worker in self._workers}.values())

    def wait_for(self, count: int, within: Deadline, ranks: Iterable[int] = ()) -> None:
        """Wait until ``count`` workers (and all of ``ranks``) are connected, and let in those that come beyond.

        Raises:
            DeadlineError: they did not come; names the ranks, those that left, and why others were not let in.
            TransportError: another thread gave up, or there is no memory for the staging buffer.
        """
        away: dict[str, None] = {}
        while True:
            for worker in [worker for worker in self._workers if not worker.link.alive]:
                away[f"{worker.link.peer} left"] = None
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
            worker.handoff, worker.taken = handoff, -1

    def tell(self, message: IPCMessage, within: Deadline) -> None:
        """Send a message to every worker; raise as `Link.send`."""
        for worker in self._workers:
            send(worker.link, message, within.again())

    def await_taken(self, bucket: int, within: Deadline) -> None:
        """Wait until every worker has copied ``bucket``; the deadline begins anew with each that one of them copies.

        Raises:
            DeadlineError: workers, which the message names, did not copy it in time.
            TransportError: one is gone, or another thread ended the wait.
        """
        left, taken = within, list[int]()
        while late := [worker for worker in self._workers if worker.hear(bucket) < bucket]:
            if taken != (taken := [worker.taken for worker in late]):
                left = within.again()
            left.check(f"{', '.join(worker.link.peer for worker in late)} did not take bucket {bucket}")
            _await_word(late, left.within(_LOOK_S))

    def close(self) -> None:
        """Disconnect all workers, and stop listening. May be called twice."""
        self._listener.close()
        for worker in self._workers:
            worker.link.close()
        self._workers = []

    def _let_in(self, link: Link, hello: Hello) -> None:
        """Let a worker in.

        Raises:
            TransportError: there is no memory for the staging buffer.
        """
        try:
            worker = _Worker(link, hello.rank, self._segment(hello.devices))
        except WeightSyncError:
            link.close()
            raise
        with suppress(WeightSyncError):  # it is gone again
            send(link, Welcome(session=self._session, segment=worker.segment.handle), Deadline(_HELLO_S))
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
