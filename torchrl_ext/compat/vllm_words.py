"""How our messages and answers pass through the four stages of vLLM's weight transfer, which return only errors.

A message goes as the ``init_info`` or ``update_info`` of a stage. An answer is raised in the worker, and comes back in
the words of the client's exception; a client of several engines raises that of one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from torchrl_ext.base.types import Info

__all__ = ["BACKEND", "BUT", "answers_in", "spoken"]

BACKEND = "torchrl_ext"
"""The name of our weight-transfer backend."""

BUT = "but"
"""Beside a message: the name of an engine that does nothing with it, by which another one behind a client is found."""

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
