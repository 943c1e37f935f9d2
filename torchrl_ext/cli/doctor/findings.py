"""Defines what `torchrl-ext doctor` asks every engine, and the findings that it notes."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchrl_ext.errors import WeightSyncError
from torchrl_ext.messages import Inspect
from torchrl_ext.types import EngineInfo, Info

__all__ = ["Examination", "Examined", "Finding", "Notes"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

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
    """Collects the findings about one place, in the order in which they are made."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.rows: list[Finding] = []

    def ok(self, check: str, found: str) -> None:
        self.rows.append(Finding(where=self._where, check=check, level="ok", found=found))

    def warning(self, check: str, found: str, expected: str, remedy: str) -> None:
        words = {"found": found, "expected": expected, "remedy": remedy}
        self.rows.append(Finding(where=self._where, check=check, level="warning", **words))

    def failure(self, check: str, found: str, expected: str, remedy: str) -> None:
        words = {"found": found, "expected": expected, "remedy": remedy}
        self.rows.append(Finding(where=self._where, check=check, level="failure", **words))

    def error(self, check: str, error: WeightSyncError) -> None:
        """Note a failure in the error's own words."""
        self.failure(check, error.what, error.expected or "", error.hint or "")


@dataclass(frozen=True, kw_only=True)
class Examination:
    """The settings of an examination, which are the same for every engine.

    Attributes:
        api_key: sent as a bearer token.
        timeout_s: deadline of each engine's discovery, in seconds.
        transport: the transport that is wanted; None for any.
        question: for the engine's workers, see `torchrl_ext.sync.inspection`.
    """

    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 10.0
    transport: str | None = None
    question: Inspect


@dataclass(frozen=True, kw_only=True)
class Examined:
    """The results of examining one engine.

    Attributes:
        address: as it was given.
        notes: findings, in the order in which they were made.
        info: None where discovery failed.
        answers: of its workers; empty where they gave none.
        dtype: of its weights, as far as it says.
    """

    address: str
    notes: Notes
    info: EngineInfo | None = None
    answers: tuple[Info, ...] = ()
    dtype: str = ""
