"""Asks an engine's workers about their surroundings, over the route that carries our messages anyway."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from torchrl_ext.errors import EngineRefusedError
from torchrl_ext.rpc.http import HTTPSession
from torchrl_ext.types import ANSWERS, CHANNEL, Info

__all__ = ["answers_in", "ask_workers", "has_route"]


def ask_workers(session: HTTPSession, kind: str, question: Info, *, timeout_s: float = 30.0) -> list[Info]:
    """The answers of an engine's workers to ``question`` (`torchrl_ext.sync.inspection`), at least one.

    Args:
        session: of the engine itself, never of a router.
        kind: as in `EngineInfo`.
        question: JSON-safe.
        timeout_s: deadline, in seconds.

    Raises:
        EngineRefusedError: the engine lacks the plugin, or has one that answers no questions.
        EngineUnreachableError, DeadlineError: as they say.
    """
    if kind == "sglang":
        route, body = "/weights_checker", {"action": CHANNEL + json.dumps({"inspect": question})}
    else:
        route, body = "/init_weight_transfer_engine", {"init_info": {"inspect": question}}
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


def answers_in(content: Any) -> list[Info]:
    """The answers of workers in what a route said, in JSON or in an error's words."""
    answers = [found for text in _strings(content) for found in _objects(text)]
    if isinstance(content, dict) and isinstance(content.get("answer"), dict):
        answers.append(content["answer"])
    return answers


def has_route(session: HTTPSession, route: str, *, timeout_s: float = 10.0) -> bool:
    """Whether the server has ``route``, asked with a method that it does not serve, so that nothing happens there."""
    return session.call("OPTIONS", route, timeout_s=timeout_s).status not in (404, 501)


def _strings(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        for value in content.values():
            yield from _strings(value)
    elif isinstance(content, list):
        for value in content:
            yield from _strings(value)


def _objects(text: str) -> Iterator[Info]:
    """JSON objects behind `ANSWERS`, or, as SGLang's data-parallel ranks answer, between bars."""
    pieces = text.split(ANSWERS)[1:] or text.split(" | ")
    for piece in pieces:
        try:
            found, _ = json.JSONDecoder().raw_decode(piece.strip())
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            yield found.get("answer", found) if isinstance(found.get("answer", found), dict) else found
