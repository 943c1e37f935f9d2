"""Exception classes; each message says what happened, what was expected, the current state, and what to do next."""

from __future__ import annotations

import re
from typing import Any

__all__ = [
    "ConcurrentUpdateError", "ConfigError", "DeadlineError", "EngineError", "EngineRefusedError",
    "EngineUnreachableError", "IntegrityError", "ManifestError", "NotConnectedError", "RouteAbsent", "StaleBaseError",
    "StoreError", "TransportError", "UpdateError", "WeightSyncError",
]  # fmt: skip


class WeightSyncError(RuntimeError):
    """The base of all errors of this package; its message has up to four parts.

    Args:
        what: what happened, and to which process or engine.
        expected: what was expected instead.
        state: the state after the error (which weights are served, which engines are paused).
        hint: what to do next.
        code: one of `CODES`, by which a sender in another process decides; "" for all other errors.

    Example:
        >>> try:
        ...     tx.make_transport("dlta", root=root)
        ... except tx.WeightSyncError as error:
        ...     print(error.what, error.hint, sep="; ")
        there is no transport called 'dlta'; did you mean 'delta'?
    """

    code: str = ""

    def __init__(
        self,
        what: str,
        *,
        expected: str | None = None,
        state: str | None = None,
        hint: str | None = None,
        code: str = "",
    ) -> None:
        self.what, self.expected, self.state, self.hint = what, expected, state, hint
        self.code = code or type(self).code
        parts = {"Expected: ": expected, "State: ": state, "Next: ": hint, "Code: ": self.code}
        sentences = [what, *(f"{name}{text}" for name, text in parts.items() if text)]
        super().__init__(" ".join(text if text.endswith("?") else f"{text.rstrip('.')}." for text in sentences))


class ConfigError(WeightSyncError, ValueError):
    """A setting or a name is invalid; raised before any I/O."""

    @classmethod
    def missing(cls, package: str | None, extra: str) -> ConfigError:
        """Return the error for a package that is not installed, with the extra of this distribution that brings it."""
        return cls(f"{package} is not installed", hint=f"pip install 'torchrl_ext[{extra}]'")


class ManifestError(WeightSyncError):
    """Names, shapes or dtypes differ between sender and receiver."""


class IntegrityError(WeightSyncError):
    """Data does not match its manifest."""


class StaleBaseError(IntegrityError):
    """An update builds on a version that the receiver does not hold; the sender has to send a full version."""

    code = "stale_base"


class DeadlineError(WeightSyncError, TimeoutError):
    """A wait timed out; the message names the peer."""


class TransportError(WeightSyncError):
    """The data layer failed."""


class NotConnectedError(TransportError):
    """A transport was used before `init_all_workers_group` or `connect`, or after `shutdown`."""


class ConcurrentUpdateError(TransportError):
    """A send was started while another one was running."""


class StoreError(TransportError):
    """A directory or a remote store could not be read or written (no space, no permission, not visible)."""


class EngineError(WeightSyncError):
    """The control layer failed.

    Args:
        rows: one `EngineRow` per engine involved.
    """

    def __init__(self, what: str, *, rows: tuple[Any, ...] = (), **more: Any) -> None:
        super().__init__(what, **more)
        self.rows = rows


class EngineUnreachableError(EngineError):
    """The engine does not answer at its address."""


class EngineRefusedError(EngineError):
    """The engine rejected a request.

    Args:
        status: the HTTP status, if any.
        reason: the engine's own error text; ``what`` may add which call failed.
    """

    def __init__(self, what: str, *, status: int | None = None, reason: str = "", **more: Any) -> None:
        super().__init__(what, **more)
        self.status, self.reason = status, reason


class RouteAbsent(EngineRefusedError):
    """The server does not have the route, or not for this method (HTTP 404, 405, 501)."""


class UpdateError(EngineError):
    """At least one engine did not accept an update.

    Args:
        report: the `SyncReport` of the attempt, with one row per engine.
    """

    def __init__(self, what: str, *, report: Any = None, **more: Any) -> None:
        super().__init__(what, **more)
        self.report = report


CODES = ("replaced", "stale_base")
"""Codes of errors that a sender answers by joining again: another sender has joined since; the base is not there."""


def code_of(error: BaseException) -> str:
    """Return the code of an error, also of one whose text came from another process; "" without one."""
    text = f"{error} {error.reason if isinstance(error, EngineRefusedError) else ''}"
    said = getattr(error, "code", "") or next(iter(_CODE.findall(text)), "")
    return said if said in CODES else ""


_CODE = re.compile(r" Code: (\w+)\.")


def parsed(text: str) -> tuple[str, dict[str, str]]:
    """Split the message of a `WeightSyncError` from another process into ``what`` and a dict of the other parts."""
    codes = [code for code in _CODE.findall(text) if code in CODES]
    rest, text = {"code": codes[0]} if codes else {}, _CODE.sub("", text)
    for name, mark in (("hint", " Next: "), ("state", " State: "), ("expected", " Expected: ")):
        text, found, part = text.partition(mark)
        if found:
            rest[name] = part.rstrip(".")
    return text.rstrip("."), rest


def error_info(error: BaseException) -> dict[str, str]:
    """Return an error as a JSON object, in which an engine's worker answers; `error_from` reverses it.

    It has ``kind`` (the name of the class), ``what``, and the ``expected``, ``state``, ``hint`` and ``code`` that there
    are. Half of a surrogate pair, which no encoder of a reply takes, becomes ``?``.
    """
    parts: dict[str, str | None] = {"what": f"{error}"}
    if isinstance(error, WeightSyncError):
        parts = {"what": error.what, "expected": error.expected, "state": error.state, "hint": error.hint}
        parts["code"] = error.code
    parts["kind"] = type(error).__name__
    return {name: text.encode("utf-8", "replace").decode() for name, text in parts.items() if text}


def error_from(info: Any) -> EngineRefusedError | DeadlineError:
    """Return the error of an engine's worker: a `DeadlineError` if it was one there, else an `EngineRefusedError`.

    ``what`` names other kinds of error than those of engines; all parts of the text stay, and so does the code.

    Args:
        info: as `error_info` returns it; what it lacks, or has of another type, is left out.
    """
    given = {name: text for name, text in info.items() if isinstance(text, str)} if isinstance(info, dict) else {}
    kind, what = given.get("kind", ""), given.get("what", "")
    more: dict[str, Any] = {name: given[name] for name in ("expected", "state", "hint", "code") if given.get(name)}
    if kind == "DeadlineError":
        return DeadlineError(what, **more)
    engines: tuple[type[EngineError], ...] = (EngineError, *EngineError.__subclasses__(), RouteAbsent)
    named = not kind or kind in {one.__name__ for one in engines}
    return EngineRefusedError(what if named else f"{kind}: {what}", **more)


def why(error: BaseException) -> str:
    """Return a description of ``error`` to embed in another error's message."""
    return error.what.rstrip(".") if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"
