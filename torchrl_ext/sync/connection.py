"""`Connection` has engines join a sender's transport."""

from __future__ import annotations

import logging
import os
import socket
import uuid
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import final

from torchrl_ext.base.deadline import Deadline, beside
from torchrl_ext.base.errors import ConfigError, EngineError, UpdateError, WeightSyncError, why
from torchrl_ext.base.reports import EngineRow, Spans, SyncReport
from torchrl_ext.base.types import ParamMeta, label_number
from torchrl_ext.control.client import EngineClient, Manner, Update
from torchrl_ext.control.fleet import Fleet
from torchrl_ext.data.transports.base import Transport

__all__ = ["Connection", "update_error"]

log = logging.getLogger("torchrl_ext")

# a client belongs to the sender that last joined its engine
_speaks_for: weakref.WeakKeyDictionary[EngineClient, weakref.ref[Connection]] = weakref.WeakKeyDictionary()


@final
class Connection:
    """Has engines join a transport, and remembers which engines joined for which parameters.

    Each join gives the connection a new id, which every step of an update carries. If another sender has joined an
    engine meanwhile, the engine refuses the step before it changes anything, and has to join again.

    Args:
        engine: client of one engine or of a fleet.
        transport: the trainer's end, which this object opens, and closes when an update failed.
        compares: whether engines will be asked to compare digests.
        rehearse: as in `WeightSender`.
        run: names the versions of this sender: a number of another run's says nothing about which is newer.

    Attributes:
        newest: highest version that an engine reported when it joined.
        delivered: version that all engines hold, on which a partial update can build; None if unknown.
    """

    def __init__(self, engine: EngineClient, transport: Transport, *, compares: bool, rehearse: str, run: str) -> None:
        self.engine, self._transport, self.run = engine, transport, run
        self._compares, self._rehearse = compares, rehearse
        self._joined: tuple[tuple[ParamMeta, ...], tuple[EngineClient, ...]] | None = None
        self._id = ""
        self.newest = 0
        self._rows: dict[str, EngineRow] = {}  # as far as this sender knows, by engine
        self.delivered: int | None = None

    def _members(self) -> tuple[EngineClient, ...]:
        self.engine.members()
        return self.engine.each()

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
        elif self._joined is not None and not self._transport.check_connection():
            log.warning("the connection has broken since the last update; the engines join again")
            self._break()
            members = self._members()
        while self._joined != (params, members):
            if self._joined is not None:
                self.delivered = None
            try:
                self._join(params, spans)
            except WeightSyncError:
                self._break()  # the group is incomplete, also for members that joined an earlier one
                before, members = members, self._members()
                if {*before} <= {*members}:
                    raise
            else:
                self._joined = params, members
        return bool(replaced)

    def drop(self) -> None:
        """End the connection after a failure, which may have left a group incomplete; the next version joins anew."""
        self._joined = self.delivered = None
        self._transport.close()

    def _break(self) -> None:
        """`drop`, and have every engine probed: one that has died may be the reason."""
        self.drop()
        if isinstance(self.engine, Fleet):
            self.engine.doubt(self.engine.engines)

    def close(self) -> None:
        """Leave the engines, except the ones that another sender has since joined through the same client."""
        self._joined = self.delivered = None
        engines = self.engine.each()
        own = [one for one in engines if _speaks_for.get(one, lambda: None)() in (None, self)]
        for client in own if len(own) < len(engines) else (self.engine,):
            client.close()

    def shrank(self) -> bool:
        """Return whether an engine that had joined is not a member any more."""
        return self._joined is not None and not {*self._joined[1]} <= {*self._members()}

    @contextmanager
    def update(self, version: int, manner: Manner) -> Iterator[Update]:
        """Yield an update of the engines to ``version``, and note what it has come to."""
        update = self.engine.update(version, manner)
        try:
            yield update
        finally:
            self.note(update.rows())

    def note(self, rows: Iterable[EngineRow]) -> None:
        """Note what an update, or an error, says of engines; where it knows no version, the one known before stands."""
        for row in rows:
            known = self._rows.get(row.engine)
            kept = row.version if row.version is not None or known is None else known.version
            run = self.run if row.version is not None else "" if known is None else known.run
            self._rows[row.engine] = replace(row, version=kept, run=run)

    def rows(self) -> tuple[EngineRow, ...]:
        """Return what is known of each engine that took part in the last update or join."""
        return tuple(self._rows.values())

    def in_service(self) -> set[int | None]:
        """Return the versions that the current members serve; None stands for an engine that is not serving."""
        rows = [self._rows.get(engine.url) for engine in self.engine.each()]
        return {(row.version or 0) if row is not None and row.state == "serving" else None for row in rows}

    def _join(self, params: tuple[ParamMeta, ...], spans: Spans) -> None:
        engine = self.engine
        found = engine.info()
        # a fleet reports its oldest version, but no version number that any of its engines has may be used again
        infos = engine.infos() if isinstance(engine, Fleet) else [found]
        clients = engine.each()
        known = {one.url: label_number(info.weight_version) for one, info in zip(clients, infos, strict=False)}
        self.newest = max([self.newest, *(label or 0 for label in known.values())])
        before, self._rows = self._rows, {}
        for one in engine.engines if isinstance(engine, Fleet) else clients:  # the lost ones, too
            row = EngineRow(engine=one.url, kind=one.kind, state="serving", version=known.get(one.url))
            self._rows[one.url] = before.get(one.url, row)
        name = self._transport.name
        for its in infos:
            if its.transports and not its.stock and name not in its.transports:  # a stock engine's port says why
                raise ConfigError(
                    f"{its.url} cannot follow by transport {name!r}",
                    expected=f"one of {', '.join(its.transports)}",
                    state="nothing was sent, and the engines serve what they did before",
                    hint="make_transport takes one of these names",
                )
        within = Deadline(self._transport.timeout_s, f"the workers of {engine.url}")
        with spans.of("connect"):
            handoff = self._transport.open(found.world_size, params, within)
            self._id = uuid.uuid4().hex
            info = {
                "timeout_s": self._transport.timeout_s,
                "transport": self._transport.name,
                "connection": self._id,
                "sender": f"a {self._transport.name} sender, process {os.getpid()} on {socket.gethostname()},",
                "params": [meta.to_json() for meta in params],
                "world_size": 1 + found.world_size,
                "unproved": self._rehearse == "never",
                "compares": self._compares,
                "offer": handoff.info,
            }
            with beside(lambda early: engine.join(info, early), within):
                handoff.transfer(within)
        for client in engine.each():
            _speaks_for[client] = weakref.ref(self)
        with spans.of("rehearse"):
            engine.rehearse(self._rehearse)


def update_error(
    error: Exception, version: str, rows: Sequence[EngineRow], report: SyncReport | None = None
) -> UpdateError:
    """Return the UpdateError for an update to ``version`` that failed with ``error``; its state comes from ``rows``."""
    known = error if isinstance(error, WeightSyncError) else WeightSyncError("")
    state = known.state if len(rows) < 2 else "error.rows lists the version that each engine serves"
    if len(rows) == 1 and rows[0].engine not in (state or ""):  # a state that names the engine is more precise
        serves = rows[0].state == "serving" and rows[0].version is not None  # else it may hold part of another version
        state = f"the engine is {rows[0].state}{f', at version {rows[0].version}' if serves else ''}"
    what, counted = why(error), len(rows) > 1 and isinstance(error, EngineError) and error.rows  # a fleet counts
    named = len(rows) == 1 and rows[0].engine in what  # which says what the only engine did not do
    return UpdateError(
        what if counted or named else f"{what}; {version} did not reach every engine",
        report=report,
        rows=tuple(rows),
        expected=known.expected,
        state=state,
        hint=known.hint,
    )
