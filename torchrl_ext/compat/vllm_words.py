"""How our messages and answers pass through the four stages of vLLM's weight transfer, which return only errors.

A message goes as the ``init_info`` or ``update_info`` of a stage. An answer is raised in the worker, and comes back in
the words of the client's exception; a client of several servers, or of data-parallel replicas, raises that of one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from torchrl_ext.base.messages import Message
from torchrl_ext.base.types import Info

__all__ = ["BACKEND", "answers_in", "each_answer", "one_by_one", "spoken"]

BACKEND = "torchrl_ext"
"""The name of our weight-transfer backend."""

_MARK = "torchrl_ext answers: "


def spoken(answer: Info) -> str:
    """Return an answer as words; vLLM's server replaces every path in an error by ``<path>``, but not ``\\/``."""
    return _MARK + json.dumps(answer).replace("/", "\\/")


def answers_in(content: Any) -> list[Info]:
    """Return the answers in an exception's words, or in JSON that has them, each once (a traceback repeats them)."""
    found: list[Info] = []
    for piece in (piece for text in _strings(content) for piece in text.split(_MARK)[1:]):
        try:
            answer, _ = json.JSONDecoder().raw_decode(piece)
        except (ValueError, RecursionError):
            continue
        if isinstance(answer, dict) and answer not in found:
            found.append(answer)
    return found


def _strings(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, (dict, list)):
        for value in content.values() if isinstance(content, dict) else content:
            yield from _strings(value)


def one_by_one(received: Any, name: Callable[[], str], handle: Callable[[Any], Info]) -> Info:
    """Have ``handle`` answer what `each_answer` sent, unless the engine called ``name`` was heard; {} then."""
    if not isinstance(received, dict) or "heard" not in received:
        return handle(received)
    own, message = name(), received.get("message")
    if own in received["heard"]:
        return {}
    if isinstance(message, dict) and message.get("kind") == "join":
        message = {**message, "rank_offset": received.get("rank_offset", 1)}
    answer = handle(message)
    return answer and {**answer, "engine": own}


def each_answer(ask: Callable[[Info], list[Info]], message: Message, world_size: int | None = None) -> list[Info]:
    """Return the answers of several engines, of which a question brings one: ask until none is left.

    Args:
        ask: sends a body, to which a client may add a ``rank_offset`` for each server, and returns the answers.
        message: for every engine; those that were not heard yet get it again.
        world_size: what a client that gives offsets checks them against; None for one that does not.
    """
    found, size = dict[str, Info](), {} if world_size is None else {"world_size": world_size}
    while True:
        told = ask({"heard": sorted(found), "message": message.to_json(), "rank_offset": 1, **size})
        fresh = {answer["engine"]: answer for answer in told if answer.get("engine", "") not in {"", *found}}
        if not fresh:
            return list(found.values())
        found |= fresh
