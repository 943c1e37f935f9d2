"""`Connection` has engines join a sender's transport."""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import final

from torchrl_ext.deadline import Deadline, beside, in_thread, one_at_a_time
from torchrl_ext.errors import ConcurrentUpdateError, UpdateError, WeightSyncError, why
from torchrl_ext.progress import progress
from torchrl_ext.reports import Spans
from torchrl_ext.rpc.client import EngineClient
from torchrl_ext.rpc.pool import Pool
from torchrl_ext.transports.base import Handoff
from torchrl_ext.types import EngineRow, Info, ParamMeta, SyncReport

__all__ = ["Connection", "update_error"]

log = logging.getLogger("torchrl_ext")

# a client belongs to the sender that last joined its engine, and only one sender at a time may update through it
_turns: weakref.WeakKeyDictionary[EngineClient, threading.Lock] = weakref.WeakKeyDictionary()
_speaks_for: weakref.WeakKeyDictionary[EngineClient, weakref.ref[Connection]] = weakref.WeakKeyDictionary()


@final
class Connection:
    """Has engines join a transport, and remembers which engines joined for which parameters.

    Each join gives the connection a new id, which every step of an update carries. If another sender has joined an
    engine meanwhile, the engine refuses the step before it changes anything, and has to join again.

    Args:
        engine: client of one engine or of a fleet.
        invite: takes the number of workers, the parameters and a deadline; returns the handoff for joining.
        transport: name of the transport.
        timeout_s: deadline of every wait of the transport, in seconds.
        compares: whether engines will be asked to compare digests.
        rehearse: as in `WeightSender`.

    Attributes:
        newest: highest version that an engine reported when it joined.
        delivered: version that all engines hold, on which a partial update can build; None if unknown.
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
        self._joined: tuple[tuple[ParamMeta, ...], tuple[EngineClient, ...]] | None = None
        self._id = ""
        self._reserved = ExitStack(), set[EngineClient]()  # in this turn
        self.newest = 0
        self.delivered: int | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Reserve the engines' clients during the block.

        Raises:
            ConcurrentUpdateError: another sender of this process is updating one of the engines.
        """
        with ExitStack() as held:
            reserved = held, set[EngineClient]()
            self._reserve(reserved, (self.engine, *self.engine.each()))
            self._reserved = reserved
            yield

    def _members(self) -> tuple[EngineClient, ...]:
        """Return the engine's members, and reserve the clients of those that have joined or returned in this turn."""
        self.engine.members()
        members = self.engine.each()
        self._reserve(self._reserved, members)
        return members

    def _reserve(self, reserved: tuple[ExitStack, set[EngineClient]], engines: Iterable[EngineClient]) -> None:
        held, already = reserved
        for engine in set(engines) - already:
            refusal = ConcurrentUpdateError(
                f"another sender of this process is updating {engine.url}",
                state="the other update continues",
                hint="update from one sender at a time, or give each sender its own engines",
            )
            held.enter_context(one_at_a_time(_turns.setdefault(engine, threading.Lock()), refusal))
            already.add(engine)

    def ensure(self, params: tuple[ParamMeta, ...], spans: Spans) -> bool:
        """Have all engines join, unless exactly the current members have joined for these parameters.

        Args:
            params: parameters to be sent.
            spans: receives the durations of ``connect`` and ``rehearse``.

        Returns:
            Whether another sender had replaced this one, so that the engines joined again.

        Raises:
            WeightSyncError: an engine did not join, and no engine has left the fleet meanwhile.
        """
        members = self._members()
        replaced = self.engine.replaced(self._id) if self._joined == (params, members) else ""
        if replaced:
            log.warning("the engines join this sender again: %s", replaced)
            self.drop()
        while self._joined != (params, members):
            try:
                self._join(params, spans)
            except WeightSyncError:
                self.drop()  # the group is incomplete, also for members that joined an earlier one
                before, members = members, self._members()
                if {*before} <= {*members}:
                    raise
            else:
                self._joined = params, members
        return bool(replaced)

    def drop(self) -> None:
        """Forget the join, so that all engines join again before the next version; a group may be incomplete."""
        self._joined = self.delivered = None

    def close(self) -> None:
        """Leave the engines, except the ones that another sender has since joined through the same client."""
        self.drop()
        engines = self.engine.each()
        own = [one for one in engines if _speaks_for.get(one, lambda: None)() in (None, self)]
        for client in own if len(own) < len(engines) else (self.engine,):
            client.close()

    def shrank(self) -> bool:
        """Return whether an engine that had joined is not a member any more."""
        return self._joined is not None and not {*self._joined[1]} <= {*self._members()}

    def in_service(self) -> set[int | None]:
        """Return the versions that the current members serve; None stands for an engine that is not serving."""
        rows = [row for engine in self.engine.each() for row in engine.rows()]
        return {(row.version or 0) if row.state == "serving" else None for row in rows}

    def _join(self, params: tuple[ParamMeta, ...], spans: Spans) -> None:
        engine = self.engine.info()
        if self._joined is not None:  # the members or the parameters have changed
            self.delivered = None
        # a pool reports its oldest version, but no version number that any of its engines has may be used again
        infos = self.engine.infos() if isinstance(self.engine, Pool) else [engine]
        labels = [info.weight_version for info in infos]
        self.newest = max([self.newest, *(int(label) for label in labels if label.isdecimal())])
        within = Deadline(self._timeout_s, f"the workers of {self.engine.url}")
        with spans.of("connect"):
            handoff = self._invite(engine.world_size, params, within)
            self._id = uuid.uuid4().hex
            info = self._invitation(handoff, params, engine.world_size)
            with beside(lambda early: self.engine.connect(info, early), within):
                handoff.transfer(within)
        for client in self.engine.each():
            _speaks_for[client] = weakref.ref(self)
        with spans.of("rehearse"), progress(f"rehearsing an update on {self.engine.url}"):
            self.engine.rehearse(self._rehearse)

    def _invitation(self, handoff: Handoff, params: tuple[ParamMeta, ...], workers: int) -> Info:
        return {
            "timeout_s": self._timeout_s,
            **handoff.info,
            "transport": self._transport,
            "connection": self._id,
            "sender": f"a {self._transport} sender, process {os.getpid()} on {socket.gethostname()},",
            "params": [meta.to_json() for meta in params],
            "world_size": 1 + workers,
            "unproved": self._rehearse == "never",
            "compares": self._compares,
        }

    def late(self, version: int) -> tuple[EngineClient, ...]:
        """Return the members that do not hold ``version``, or were started again since they joined."""
        return tuple(
            one for one in self._members() if {row.version for row in one.rows()} != {version} or one.replaced(self._id)
        )

    def admit(
        self,
        late: Sequence[EngineClient],
        params: tuple[ParamMeta, ...],
        take: Callable[[EngineClient], object],
        spans: Spans,
    ) -> dict[EngineClient, Exception]:
        """Have members join beside the others, who notice nothing, and ``take`` a version; return who failed, and why.

        If none failed, the next update goes on as if all had joined together.
        """
        failed: dict[EngineClient, Exception] = {}
        self._id = self._id or uuid.uuid4().hex
        with spans.of("connect"):
            within = Deadline(self._timeout_s, f"the workers of {', '.join(one.url for one in late)}")
            handoff = self._invite(len(late), params, within)

        def admit(one: EngineClient) -> None:
            info = one.info()
            if info.weight_version.isdecimal():
                self.newest = max(self.newest, int(info.weight_version))
            one.connect({**self._invitation(handoff, params, info.world_size), "rank_offset": 1})
            _speaks_for[one] = weakref.ref(self)
            one.rehearse(self._rehearse)
            # a pool of one tells the fleet's record of health how it went
            take(Pool([one], health=self.engine.health) if isinstance(self.engine, Pool) else one)

        with spans.of("load"):
            jobs = {one: in_thread(partial(admit, one), f"catch up {one.url}") for one in late}
            for one, job in jobs.items():
                try:
                    job.result()
                except Exception as error:  # noqa: BLE001 - any error belongs in this engine's row
                    failed[one] = error
        if self._joined is not None and self._joined[0] == params and not failed:
            self._joined = params, self.engine.each()
        return failed


def update_error(
    error: Exception, version: str, rows: Sequence[EngineRow], report: SyncReport | None = None
) -> UpdateError:
    """Return the UpdateError for an update to ``version`` that failed with ``error``; its state comes from ``rows``."""
    known = error if isinstance(error, WeightSyncError) else WeightSyncError("")
    state = known.state if len(rows) < 2 else "error.rows lists the version that each engine serves"
    if len(rows) == 1 and rows[0].engine not in (state or ""):  # a state that names the engine is more precise
        serves = rows[0].state == "serving" and rows[0].version is not None  # else it may hold part of another version
        state = f"the engine is {rows[0].state}{f', at version {rows[0].version}' if serves else ''}"
    return UpdateError(
        f"{why(error)}; {version} did not reach every engine",
        report=report,
        rows=tuple(rows),
        expected=known.expected,
        state=state,
        hint=known.hint,
    )
