"""Asks an engine's workers about their surroundings, over the route that carries our messages anyway."""

from __future__ import annotations

import json

from torchrl_ext.errors import EngineRefusedError
from torchrl_ext.messages import CHANNEL, Inspect, answers_in
from torchrl_ext.rpc.http import HTTPSession
from torchrl_ext.types import Info

__all__ = ["ask_workers", "has_route"]


def ask_workers(session: HTTPSession, kind: str, question: Inspect, *, timeout_s: float = 30.0) -> list[Info]:
    """The answers of an engine's workers to ``question`` (`torchrl_ext.sync.inspection`), at least one.

    Args:
        session: of the engine itself, never of a router.
        kind: as in `EngineInfo`.
        timeout_s: deadline, in seconds.

    Raises:
        EngineRefusedError: the engine lacks the plugin, or has one that answers no questions.
        EngineUnreachableError, DeadlineError: as they say.
    """
    if kind == "sglang":
        route, body = "/weights_checker", {"action": CHANNEL + json.dumps(question.to_json())}
    else:
        route, body = "/init_weight_transfer_engine", {"init_info": question.to_json()}
    told = session.call("POST", route, body, timeout_s=timeout_s)
    try:
        content = told.json()
    except ValueError:
        content = {}
    answers = [found for found in answers_in(content) if "torchrl_ext" in found and "host" in found]
    if not answers:
        raise EngineRefusedError(
            f"POST {session.url}{route} answered {told.status}: {told.message() or 'nothing'}",
            expected="an answer of torchrl_ext's plugin",
            hint="install this version of torchrl_ext in the engine's environment",
            status=told.status,
        )
    return answers


def has_route(session: HTTPSession, route: str, *, timeout_s: float = 10.0) -> bool:
    """Whether the server has ``route``, asked with a method that it does not serve, so that nothing happens there."""
    return session.call("OPTIONS", route, timeout_s=timeout_s).status not in (404, 501)
