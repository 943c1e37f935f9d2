"""Messages by which the ranks of a group tell that a handoff comes, that it arrived, or why not."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import DeadlineError, NotConnectedError, TransportError, WeightSyncError, why
from torchrl_ext.transports.base import Arrival, deadline
from torchrl_ext.transports.group.peers import Carrier
from torchrl_ext.types import Info, ParamMeta

__all__ = [
    "Announcements",
    "acknowledge",
    "await_others",
    "await_workers",
    "receiving_failed",
    "refused",
    "require",
    "sending_failed",
    "stop_reason",
    "tell_stopped",
]

_LAST_WORDS_S = 1.0
"""How long one side waits, after a failure, for those that are alive to say so."""
_LOOK_S = 0.5
"""How often a worker that waits looks whether its group is still there."""


def acknowledge(group: Carrier, handoff: int, answer: int | str = "") -> None:
    """Tell the trainer that all bytes of a handoff are here, and how many, or why it was refused (worker end)."""
    group.acknowledged = handoff
    group.notes.put(f"arrived/{group.generation}/{handoff}/{group.rank}", answer)


def await_others(group: Carrier) -> None:
    """Wait until every worker has answered to the handoff that this one did; to be called by one that leaves.

    Its connections close, by which workers that still receive see the group broken: they cannot tell a rank that has
    all from one that died.
    """
    until = deadline(group.timeout_s)
    group.notes.patience_s = _LAST_WORDS_S
    with contextlib.suppress(NotConnectedError):  # the trainer is gone, so nobody receives any more
        while group.alive and group.whole and not group.notes.stop.is_set() and time.monotonic() < until:
            over = group.notes.wait(f"over/{group.generation}/{group.acknowledged}", min(until, deadline(_LOOK_S)))
            if over or stop_reason(group) is not None:
                return


def await_workers(group: Carrier, handoff: int) -> dict[int, Any]:
    """Wait for each worker's answer to the handoff: bytes or ``""`` where it was taken, else why not (trainer end).

    Raises:
        DeadlineError: names the workers that say nothing within the group's deadline.
        TransportError: another thread aborted.
    """
    key = f"arrived/{group.generation}/{handoff}/"
    said = group.notes.collect(key, group.workers, deadline(group.timeout_s))
    if group.notes.stop.is_set():
        raise TransportError("the transfer was aborted")
    if len(said) < len(group.workers):
        silent = group.call(rank for rank in group.workers if rank not in said)
        raise DeadlineError(f"no word within {group.timeout_s:g} s from {silent} that it arrived")
    group.notes.sweep(key, f"over/{group.generation}/")
    group.notes.put(f"over/{group.generation}/{handoff}", True)
    return said


def refused(group: Carrier, version: int, said: Mapping[int, Any]) -> TransportError:
    """Return the error that tells which workers have every byte but could not load them, and why (trainer end)."""
    refusals = "; ".join(f"{group.call([rank])}: {words}" for rank, words in said.items() if words)
    return TransportError(
        f"weights version {version} was not taken by {refusals}",
        state="the other workers have it, and the group is intact",
    )


def sending_failed(group: Carrier, handoff: int, version: int, error: WeightSyncError) -> WeightSyncError:
    """Return the trainer's ``error`` again, with the ranks that are silent and the words of those that are not."""
    said, silent = {}, []
    if not group.notes.stop.is_set():
        key = f"arrived/{group.generation}/{handoff}/"
        said = group.notes.collect(key, group.workers, deadline(_LAST_WORDS_S))
        silent = [rank for rank in group.workers if rank not in said]
    lost = f"; no sign of life from {group.call(silent)}" if silent else ""
    words = [f"rank {rank} says: {text}" for rank, text in said.items() if text and type(text) is str]
    return type(error)(
        f"weights version {version} did not reach {group.call(group.workers)}: {error.what}{lost}",
        expected=error.expected,
        state="; ".join([*words, "workers may hold a part of it, and the group is closed"]),
        hint="connect again (init_all_workers_group, or the next update_weights) when every worker is up",
    )


def receiving_failed(group: Carrier, handoff: int, version: int, error: WeightSyncError) -> WeightSyncError:
    """Tell the trainer of the worker's ``error``, and return it again with what is known of the trainer."""
    try:
        group.notes.patience_s = _LAST_WORDS_S
        acknowledge(group, handoff, why(error))
        group.sever()
        trainer = stop_reason(group, _LAST_WORDS_S) or "it is alive, so the network or another worker failed"
    except NotConnectedError:
        trainer = "its store is gone, so it died or was shut down"
    return type(error)(
        f"rank {group.rank} lost weights version {version} on its way from the trainer, "
        f"{group.call([0])}: {error.what}",
        expected=error.expected,
        state=f"of the trainer: {trainer}. This rank may hold a part of the version, and its group is closed",
        hint="connect again when the trainer does",
    )


def tell_stopped(group: Carrier, reason: str) -> None:
    """Leave the reason for the end of the group where workers find it (trainer end)."""
    with contextlib.suppress(NotConnectedError):
        group.notes.put(f"stopped/{group.generation}", reason)


def stop_reason(group: Carrier, timeout_s: float = 0.0) -> str | None:
    """Return why the trainer ended the group; None if it does not say so in ``timeout_s`` seconds (worker end)."""
    found = group.notes.wait(f"stopped/{group.generation}", deadline(timeout_s))
    return str(found[0]) if found else None


class Announcements:
    """One rank's place in the sequence of a group's announcements.

    Args:
        group: whose ranks they are for.
    """

    def __init__(self, group: Carrier) -> None:
        self.group = group
        self._count = 0
        self._params: tuple[ParamMeta, ...] = ()

    def put(self, arrival: Arrival) -> None:
        """Announce a version next (trainer end), and remove the announcement before, which its readers have read."""
        self._count += 1
        rows = None if arrival.params == self._params else [meta.to_json() for meta in arrival.params]
        note = {**arrival.info, "version": arrival.version, "params": rows}  # a model's parameters rarely change
        self.group.notes.put(self._key(self._count), note)
        self.group.notes.drop(self._key(self._count - 1))
        self._params = arrival.params

    def get(self, within: Deadline) -> Arrival | None:
        """Return the next announcement, or None at the deadline (worker end).

        Raises:
            NotConnectedError: the trainer ended the group, or is gone, or another thread aborted.
            TransportError, ManifestError: what is announced is no handoff.
        """
        group, key = self.group, self._key(self._count + 1)
        try:
            while not (found := group.notes.wait(key, min(within.until, deadline(_LOOK_S)))):
                reason = self._ended()
                if reason is not None:
                    raise NotConnectedError(
                        f"rank {group.rank} is no longer connected to the trainer, {group.call([0])}: {reason}",
                        hint="connect again when the trainer does",
                    )
                if within.over:
                    return None
        except NotConnectedError:
            group.sever()
            raise
        self._count, info = self._count + 1, found[0]
        rows = info.pop("params", 0) if type(info) is dict else 0
        if type(rows) is list:
            self._params = tuple(map(ParamMeta.from_json, rows))
        if rows == 0 or (rows is None and not self._params) or type(info.get("version")) is not int:
            raise TransportError(
                f"the trainer, {group.call([0])}, announced {str(info)[:200]!r}",
                expected="what its transport says of a handoff, with a list of parameters",
                state="nothing was received",
                hint="use the same version of torchrl_ext on every rank",
            )
        return Arrival(version=info.pop("version"), params=self._params, info=info)

    def _ended(self) -> str | None:
        if self.group.notes.stop.is_set():
            return "this rank aborted"
        return stop_reason(self.group) or (None if self.group.whole else "a connection of the group was closed")

    def _key(self, number: int) -> str:
        return f"announced/{self.group.generation}/{number}"


def require(transport: str, info: Info, **fields: type) -> None:
    """Check that fields of what a trainer says have these types; a float may be an integer, and none is negative.

    Raises:
        TransportError: names the field.
    """
    for name, kind in fields.items():
        value: Any = info.get(name)
        if type(value) not in ((int, float) if kind is float else (kind,)) or (kind is int and value < 0):
            raise TransportError(
                f"{name} is {str(value)[:200]!r} in what the trainer says of the {transport} transport",
                expected="a whole number, 0 or more" if kind is int else f"a {kind.__name__}",
                state="nothing was received",
                hint="use the same version of torchrl_ext in trainer and engine",
            )
