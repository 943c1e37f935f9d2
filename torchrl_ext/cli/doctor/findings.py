"""What `torchrl-ext doctor` writes down."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_ext.errors import WeightSyncError

__all__ = ["Finding", "Notes"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        where: an engine's address, ``"trainer"`` or ``"fleet"``.
        check: what was looked at, in a word.
        level: ``"ok"``, ``"warning"`` (an update works, with a catch) or ``"failure"`` (it would not work).
        found: what there is.
        expected: what there should be; empty where all is well.
        remedy: what to do; empty where all is well.
    """

    where: str
    check: str
    level: str
    found: str
    expected: str = ""
    remedy: str = ""


class Notes:
    """Findings about one place, as they are made."""

    def __init__(self, where: str) -> None:
        self._where, self._found = where, []

    def found(self) -> tuple[Finding, ...]:
        return tuple(self._found)

    def ok(self, check: str, found: str) -> None:
        self._add(check, "ok", found)

    def warning(self, check: str, found: str, expected: str, remedy: str) -> None:
        self._add(check, "warning", found, expected, remedy)

    def failure(self, check: str, found: str, expected: str, remedy: str) -> None:
        self._add(check, "failure", found, expected, remedy)

    def error(self, check: str, error: WeightSyncError) -> None:
        self._add(check, "failure", error.what, error.expected or "", error.hint or "")

    def _add(self, check: str, level: str, found: str, expected: str = "", remedy: str = "") -> None:
        self._found.append(
            Finding(where=self._where, check=check, level=level, found=found, expected=expected, remedy=remedy)
        )
