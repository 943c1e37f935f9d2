"""The tree of errors; every message says what happened, what was expected, what the state is now, what to do next."""

from __future__ import annotations

from typing import Any

__all__ = [
    "ConcurrentUpdateError", "ConfigError", "DeadlineError", "EngineError", "EngineRefusedError",
    "EngineUnreachableError", "IntegrityError", "ManifestError", "NotConnectedError", "RouteAbsent", "StaleBaseError",
    "StoreError", "TransportError", "UpdateError", "WeightSyncError",
]  # fmt: skip


class WeightSyncError(RuntimeError):
    """The root of the tree of errors, which makes one message of up to four parts.

    Args:
        what: what happened, with the names of the parties.
        expected: what should have been there instead.
        state: what holds now (which weights are served, who is paused).
        hint: what to do next.

    Example:
        >>> try:
        ...     tx.make_transport("dlta", root=root)
        ... except tx.WeightSyncError as error:
        ...     print(error.what, error.hint, sep="; ")
        there is no transport called 'dlta'; did you mean 'delta'?
    """

    def __init__(
        self, what: str, *, expected: str | None = None, state: str | None = None, hint: str | None = None
    ) -> None:
        self.what, self.expected, self.state, self.hint = what, expected, state, hint
        parts = {"Expected: ": expected, "State: ": state, "Next: ": hint}
        further = (f"{name}{text.rstrip('.')}." for name, text in parts.items() if text)
        super().__init__(" ".join((what.rstrip(".") + ".", *further)))


class ConfigError(WeightSyncError, ValueError):
    """A setting or a name cannot work; raised before any I/O."""


class ManifestError(WeightSyncError):
    """Names, shapes or dtypes do not agree between two parties."""


class IntegrityError(WeightSyncError):
    """Bytes are not what their manifest promises."""


class StaleBaseError(IntegrityError):
    """A version builds on one that its receiver does not hold; everything has to be sent."""


class DeadlineError(WeightSyncError, TimeoutError):
    """A wait reached its deadline; the message names the peer."""


class TransportError(WeightSyncError):
    """The data layer failed."""


class NotConnectedError(TransportError):
    """A transport was used before `init_all_workers_group` or `connect`, or after `shutdown`."""


class ConcurrentUpdateError(TransportError):
    """A second send was started while one was running."""


class StoreError(TransportError):
    """A directory or an object store could not be written or read: no space, no permission, not visible."""


class EngineError(WeightSyncError):
    """The control layer failed.

    Args:
        rows: one `EngineRow` per engine that took part.
    """

    def __init__(self, what: str, *, rows: tuple[Any, ...] = (), **more: str | None) -> None:
        super().__init__(what, **more)
        self.rows = rows


class EngineUnreachableError(EngineError):
    """Nothing answers at the engine's address."""


class EngineRefusedError(EngineError):
    """The engine answered, and the answer is no.

    Args:
        status: the HTTP status, where there is one.
        reason: the engine's own words, where ``what`` also says by which call they came.
    """

    def __init__(self, what: str, *, status: int | None = None, reason: str = "", **more: Any) -> None:
        super().__init__(what, **more)
        self.status, self.reason = status, reason


class RouteAbsent(EngineRefusedError):
    """The server has no such route, or none that takes this method (HTTP 404, 405, 501)."""


class UpdateError(EngineError):
    """Not every engine accepted an update.

    Args:
        report: the `SyncReport` of the attempt, with a row per engine.
    """

    def __init__(self, what: str, *, report: Any = None, **more: Any) -> None:
        super().__init__(what, **more)
        self.report = report


def parsed(text: str) -> tuple[str, dict[str, str]]:
    """Return the first part of the message of a `WeightSyncError` of another process, and the others by name."""
    rest: dict[str, str] = {}
    for name, mark in (("hint", " Next: "), ("state", " State: "), ("expected", " Expected: ")):
        text, found, part = text.partition(mark)
        if found:
            rest[name] = part.rstrip(".")
    return text.rstrip("."), rest


def why(error: BaseException) -> str:
    """Return the words of ``error`` that fit into another error's message."""
    return error.what.rstrip(".") if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"
