"""How messages and answers get through the routes of vLLM and SGLang, and who may call the routes that are ours.

An engine's plugin and its client share the names and readers here, and the messages that only SGLang's takes.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torchrl_ext.messages import Message
from torchrl_ext.types import Info, least

__all__ = [
    "ADAPTERS_ROUTE", "ANSWERS", "BACKEND", "CHANNEL", "OPEN_UPDATE", "TAKE_OVER", "Flush", "ListAdapters",
    "answers_in", "asleep_by", "bears_key", "escaped", "merged", "refusal", "unescaped",
]  # fmt: skip

BACKEND = "torchrl_ext"
"""The name of our weight-transfer backend inside vLLM."""

TAKE_OVER = "torchrl_ext_backend"
"""The collective call that gives vLLM's workers our backend in place of the one that the engine was made with."""

CHANNEL = "torchrl_ext:"
"""What our messages to SGLang begin with; they travel as the ``action`` of its ``/weights_checker``."""

ANSWERS = "torchrl_ext answers: "
"""What vLLM's workers put before an answer in JSON; their route can hand nothing back but an error's words."""

OPEN_UPDATE = "torchrl_ext: an earlier weight update is still open"
"""What an engine's refusal to join says when ``/finish_weight_update`` has to end an abandoned update first."""

ADAPTERS_ROUTE = "/torchrl_ext/adapters"
"""The route on which our plugin in vLLM lists LoRA adapters (GET), and takes the messages about them (POST)."""

_IF_ANY, _IF_ALL = ("working", "needed", "empty", "paused"), ("flushed", "restored", "whole")

_GAUGE = re.compile(r'^vllm:engine_sleep_state\{[^}\n]*sleep_state="(\w+)"[^}\n]*\}\s+([0-9.e+]+)', re.MULTILINE)


class Flush(Message, frozen=True, kw_only=True):
    """Tells SGLang to drop cached keys and values; the answer has ``flushed``, false while requests use them."""


class ListAdapters(Message, frozen=True, kw_only=True):
    """Asks SGLang which version each adapter name stands for; the answer has ``adapters``: ``{name: {"version"}}``."""


def merged(answers: Sequence[Info]) -> Info:
    """Merge the answers of workers or replicas: a flag holds for any or for all of them, and the proof is the least."""
    found = {name: value for answer in answers for name, value in answer.items()}
    found |= {name: any(answer.get(name) for answer in answers) for name in _IF_ANY if name in found}
    found |= {name: all(answer.get(name, True) for answer in answers) for name in _IF_ALL if name in found}
    if "proof" in found:
        found["proof"] = least(str(answer["proof"]) for answer in answers if "proof" in answer)
    return found


def answers_in(content: Any) -> list[Info]:
    """Return the answers of workers in a route's response, which has them as JSON or inside an error's message."""
    answers = [found for text in _strings(content) for found in _objects(text)]
    if isinstance(content, dict) and isinstance(content.get("answer"), dict):
        answers.append(content["answer"])
    return answers


def asleep_by(metrics: str) -> Info:
    """Return what vLLM's gauge says of a paused engine: ``paused``, ``asleep``, a set of tags, and ``dropped``.

    Level 0 of its sleep and a cache that sleeps alone look the same there.

    Args:
        metrics: as vLLM's server answers to ``GET /metrics``.
    """
    rows = _GAUGE.findall(metrics)
    found = {state for state, value in rows if float(value) > 0}
    if not rows or "awake" in found:
        return {"paused": True}
    if found & {"weights_offloaded", "discard_all"}:
        both = frozenset({"weights", "kv_cache"})
        return {"paused": True, "asleep": both, "dropped": "discard_all" in found}
    return {"paused": True, "asleep": frozenset({"kv_cache"})}


def escaped(words: str) -> str:
    """Return a worker's words in a form in which vLLM's server finds no path.

    It puts ``<path>`` in place of every path in an error (0.32, `sanitize_message`), also of one that the trainer named
    itself. ``\\/`` is ``/`` in JSON, so that an answer in JSON stays one. `unescaped` is the inverse.
    """
    return words.replace("/", "\\/")


def unescaped(words: str) -> str:
    """Return what was given to `escaped`; words that nobody escaped stay as they are."""
    return words.replace("\\/", "/")


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
    """Yield the JSON objects that follow `ANSWERS`, or, as SGLang's data-parallel ranks answer, lie between bars."""
    pieces = text.split(ANSWERS)[1:] or text.split(" | ")
    for piece in pieces:
        try:
            found, _ = json.JSONDecoder().raw_decode(piece.strip())
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            yield found


def bears_key(authorization: str | None, keys: Collection[str]) -> bool:
    """Return whether a request may pass: there are no keys, or its ``Authorization`` header is ``Bearer`` and a key.

    Keys are compared in constant time.
    """
    scheme, _, credentials = (authorization or "").partition(" ")
    given = credentials.strip().encode()
    matches = [secrets.compare_digest(given, key.encode()) for key in keys]
    return not keys or (scheme.lower() == "bearer" and any(matches))


def refusal() -> dict[str, Any]:
    """Return the body of a 401 response, in the shape of vLLM's errors."""
    row = {"message": "this route wants the engine's API key", "type": "Unauthorized", "param": None, "code": 401}
    return {"error": row}
