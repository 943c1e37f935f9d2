"""`Connection` joins engines to a transport, and they follow its sender from then on."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import final

from torchrl_ext.deadline import Deadline, beside, one_at_a_time
from torchrl_ext.errors import ConcurrentUpdateError, UpdateError, WeightSyncError, why
from torchrl_ext.rpc.client import EngineClient
from torchrl_ext.rpc.pool import Pool
from torchrl_ext.transports.base import Handoff
from torchrl_ext.types import EngineRow, ParamMeta, SyncReport

__all__ = ["Connection", "Spans", "update_error"]

log = logging.getLogger("torchrl_ext")

# a client speaks for the sender that joined last through it, so one sender at a time updates by it
_turns: weakref.WeakKeyDictionary[EngineClient, threading.Lock] = weakref.WeakKeyDictionary()
_speaks_for: weakref.WeakKeyDictionary[EngineClient, weakref.ref[Connection]] = weakref.WeakKeyDictionary()


@final
class Spans(dict[str, float]):
    """A dictionary of the seconds that each phase of an update took."""

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Add the time that the block takes to ``phase``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self[phase] = self.get(phase, 0.0) + time.perf_counter() - began


@final
class Connection:
    """Lets engines join a transport, and remembers which of them have joined, for which parameters.

    Each time they join, the connection gets a new id, which every step of an update bears: an engine that another
    sender joined meanwhile refuses the step before it touches anything, and has to be joined again.

    Args:
        engine: a client, or a fleet.
        invite: takes the number of workers, the parameters and a deadline; returns the handoff by which they join.
        transport: its name.
        timeout_s: deadline of every wait of the transport, in seconds.
        compares: whether engines will be asked to compare digests.
        rehearse: as in `WeightSender`.

    Attributes:
        newest: the greatest version that an engine said it serves when it joined.
        delivered: the version that all of them hold, which a part can build on; None where this is not known.
    """

    def __init__(
        self,
        engine: EngineClient,
        invite: Callable[[int, tuple[ParamMeta, ...], Deadline], Handoff],
        *,
        transport: str,
        timeout_s: float = 60.0,
        compares: bool = True,
        rehearse: str = "once",
    ) -> None:
        self.engine, self._invite, self._transport, self._timeout_s = engine, invite, transport, timeout_s
        self._compares, self._rehearse = compares, rehearse
        self._joined: tuple[tuple[ParamMeta, ...], tuple[str, ...]] | None = None
        self._id = ""
        self.newest = 0
        self.delivered: int | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the clients of the engines for one update.

        Raises:
            ConcurrentUpdateError: another sender of this process is in an update by one of them.
        """
        with ExitStack() as held:
            for engine in dict.fromkeys((self.engine, *self.engine.each())):
                refusal = ConcurrentUpdateError(
                    f"another sender of this process is updating {engine.url}",
                    state="that update goes on",
                    hint="let one sender after the other send, or give each engines of its own",
                )
                held.enter_context(one_at_a_time(_turns.setdefault(engine, threading.Lock()), refusal))
            yield

    def ensure(self, params: tuple[ParamMeta, ...], spans: Spans) -> bool:
        """Let every engine join, unless exactly the present members have joined for these parameters.

        Returns:
            Whether they had joined before, and another sender in the place of this one since.

        Args:
            params: what will be sent.
            spans: takes the seconds of the phases ``connect`` and ``rehearse``.

        Raises:
            WeightSyncError: an engine did not join, and no engine left the fleet meanwhile.
        """
        members = self.engine.members()
        replaced = self.engine.replaced(self._id) if self._joined == (params, members) else ""
        if replaced:
            log.warning("engines join once more: %s", replaced)
            self.drop()
        while self._joined != (params, members):
            try:
                self._join(params, spans)
            except WeightSyncError:
                before, members = members, self.engine.members()
                if len(members) >= len(before):
                    raise
            else:
                self._joined = params, members
        return bool(replaced)

    def drop(self) -> None:
        """Forget which engines joined, so that all join anew before the next version: a group may be left half-made."""
        self._joined = self.delivered = None

    def close(self) -> None:
        """Leave the engines, but for those that another sender has joined through the same client since."""
        self.drop()
        engines = self.engine.each()
        own = [one for one in engines if _speaks_for.get(one, lambda: None)() in (None, self)]
        for client in own if len(own) < len(engines) else (self.engine,):
            client.close()

    def shrank(self) -> bool:
        """Return whether engines have left the fleet since they joined."""
        return self._joined is not None and len(self.engine.members()) < len(self._joined[1])

    def in_service(self) -> set[int | None]:
        """Return the versions that the engines serve which take part now: None where one serves nothing."""
        rows = [row for engine in self.engine.each() for row in engine.rows()]
        return {(row.version or 0) if row.state == "serving" else None for row in rows}

    def _join(self, params: tuple[ParamMeta, ...], spans: Spans) -> None:
        engine = self.engine.info()
        if self._joined is not None:  # with other members, or for other parameters
            self.delivered = None
        # a pool is described by its oldest version; a number that any of its engines has is used up
        infos = self.engine.infos() if isinstance(self.engine, Pool) else [engine]
        labels = [info.weight_version for info in infos]
        self.newest = max([self.newest, *(int(label) for label in labels if label.isdecimal())])
        within = Deadline(self._timeout_s, f"the workers of {self.engine.url}")
        with spans.of("connect"):
            handoff = self._invite(engine.world_size, params, within)
            self._id = uuid.uuid4().hex
            info = {
                "timeout_s": self._timeout_s,
                **handoff.info,
                "transport": self._transport,
                "connection": self._id,
                "sender": f"a {self._transport} sender, process {os.getpid()} on {socket.gethostname()},",
                "params": [meta.to_json() for meta in params],
                "world_size": 1 + engine.world_size,
                "unproved": self._rehearse == "never",
                "compares": self._compares,
            }
            with beside(lambda early: self.engine.connect(info, early), within):
                handoff.transfer(within)
        for client in self.engine.each():
            _speaks_for[client] = weakref.ref(self)
        with spans.of("rehearse"):
            self.engine.rehearse(self._rehearse)


def update_error(
    error: Exception, version: str, rows: Sequence[EngineRow], report: SyncReport | None = None
) -> UpdateError:
    """Return the error of an update to ``version`` that failed with ``error``; ``rows`` have the state."""
    known = error if isinstance(error, WeightSyncError) else WeightSyncError("")
    state = known.state if len(rows) < 2 else "the rows say which engines serve which version"
    if len(rows) == 1 and rows[0].engine not in (state or ""):  # else its client says more
        serves = rows[0].state == "serving" and rows[0].version is not None  # else it may hold a part of another one
        state = f"the engine is {rows[0].state}{f', at version {rows[0].version}' if serves else ''}"
    return UpdateError(
        f"{why(error)}; {version} did not reach every engine",
        report=report,
        rows=tuple(rows),
        expected=known.expected,
        state=state,
        hint=known.hint,
    )
