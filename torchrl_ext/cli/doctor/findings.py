"""Defines the findings of `torchrl-ext doctor`, and what its checks of an engine look at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrl_ext.errors import WeightSyncError
from torchrl_ext.types import EngineInfo, Info

if TYPE_CHECKING:
    from torchrl_ext.cli.doctor.shared import Trainer
    from torchrl_ext.rpc.http import Answer, HTTPSession
    from torchrl_ext.rpc.server_info import ServerInfo

__all__ = ["Context", "Finding", "failed", "failure", "ok", "warning"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        level: ``"ok"``, ``"warning"`` (an update works, with a catch) or ``"failure"`` (an update would fail).
        check: the name of the check.
        found: the actual state.
        expected, remedy: the state that an update needs, and how to reach it; empty if the level is ``"ok"``.
        where: an engine's address, ``"trainer"`` or ``"fleet"``; set after the check.
    """

    level: str
    check: str
    found: str
    expected: str = ""
    remedy: str = ""
    where: str = ""


ok, warning, failure = (partial(Finding, level) for level in ("ok", "warning", "failure"))


def failed(check: str, error: WeightSyncError) -> Finding:
    """Return a failure with the error's texts."""
    return failure(check, error.what, error.expected or "", error.hint or "")


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the checks of one engine look at.

    Attributes:
        trainer: the trainer's side.
        http: a session with the engine.
        info, facts: the engine's description of itself.
        date: the engine's first answer, and this machine's clock before and after it, in seconds since 1970.
        client: the engine's `torchrl_ext.EngineClient`.
        answers: of the workers (`torchrl_ext.sync.inspection`); empty if they gave none.
        refusal: why the workers gave no answer.
    """

    trainer: Trainer
    http: HTTPSession
    info: EngineInfo
    facts: ServerInfo
    date: tuple[Answer, float, float]
    client: Any
    answers: list[Info]
    refusal: WeightSyncError | None
