"""Encoding of messages and answers in the routes of vLLM and SGLang, and the guard of our own routes.

An engine's plugin and its client share these names and functions, and the messages that only SGLang's plugin handles.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from typing import Any

from torchrl_ext.base.errors import ConfigError, EngineRefusedError
from torchrl_ext.base.messages import Message
from torchrl_ext.base.reports import least
from torchrl_ext.base.types import Info

__all__ = [
    "ANSWERS", "BACKEND", "CHANNEL", "FROM_A_PAGE", "MAX_BODY_BYTES", "OPEN_UPDATE", "TAKE_OVER", "Flush", "Guard",
    "answers_in", "bears_key", "each_answer", "envelope", "escaped", "merged", "one_by_one", "out_of_step", "unescaped",
]  # fmt: skip

BACKEND = "torchrl_ext"
"""The name of our weight-transfer backend inside vLLM."""

TAKE_OVER = "torchrl_ext_backend"
"""Collective RPC that replaces the weight-transfer backend of vLLM's workers with ours."""

CHANNEL = "torchrl_ext:"
"""Prefix of our messages to SGLang, which are sent as the ``action`` of its ``/weights_checker``."""

ANSWERS = "torchrl_ext answers: "
"""Prefix of a JSON answer from vLLM's workers, whose route can return only error messages."""

OPEN_UPDATE = "torchrl_ext: an earlier weight update is still open"
"""Text of an engine's refusal to join when ``/finish_weight_update`` has to end an abandoned update first."""

MAX_BODY_BYTES = 64 << 20
"""The most that a body may have: far more than a hundred thousand parameters with long names need."""

FROM_A_PAGE = "web pages may not call this engine: the request has the header Origin"
"""Words of a refusal."""

_Asgi = Callable[..., Awaitable[None]]

_IF_ANY, _IF_ALL = ("working", "needed", "empty", "paused"), ("flushed", "restored", "whole")


class Flush(Message, frozen=True, kw_only=True):
    """Tells SGLang to flush its KV cache; the answer has ``flushed``, which is false while requests use the cache."""


def merged(answers: Sequence[Info]) -> Info:
    """Merge answers of workers or replicas: flags by any or all, ``proof`` by the weakest, other fields by the last."""
    found = {name: value for answer in answers for name, value in answer.items()}
    found |= {name: any(answer.get(name) for answer in answers) for name in _IF_ANY if name in found}
    found |= {name: all(answer.get(name, True) for answer in answers) for name in _IF_ALL if name in found}
    if "proof" in found:
        found["proof"] = least(str(answer["proof"]) for answer in answers if "proof" in answer)
    return found


def answers_in(content: Any) -> list[Info]:
    """Return the workers' answers in a route's response, which has them as JSON or inside an error message."""
    answers = [found for text in _strings(content) for found in _objects(text)]
    if isinstance(content, dict) and isinstance(content.get("answer"), dict):
        answers.append(content["answer"])
    return answers


def one_by_one(received: Any, name: Callable[[], str], handle: Callable[[Any], Info]) -> Info:
    """Have ``handle`` answer a message, which may be in an `envelope`: then the answer has the engine's ``name``."""
    if not isinstance(received, dict) or "heard" not in received:
        return handle(received)
    own, message = name(), received.get("message")
    if own in received["heard"]:
        return {}
    if isinstance(message, dict) and message.get("kind") == "join":
        message = {**message, "rank_offset": received.get("rank_offset", 1)}
    answer = handle(message)
    return answer and {**answer, "engine": own}


def envelope(message: Message, heard: Collection[str], world_size: int | None) -> Info:
    """Return a body for a client of several engines, which may hand on the answer of only one of them.

    Engines that were ``heard`` leave it alone. A client may give each engine's body another ``rank_offset``.
    """
    size = {} if world_size is None else {"world_size": world_size}
    return {"heard": sorted(heard), "message": message.to_json(), "rank_offset": 1, **size}


def each_answer(ask: Callable[[Info], list[Info]], message: Message, world_size: int | None = None) -> list[Info]:
    """Return the answers of several engines behind one address, of which a question brings one: ask until none is left.

    Args:
        ask: sends a body (`envelope`), and returns the answers that came.
        message: for every engine; those that were not heard yet get it again.
        world_size: see `envelope`.
    """
    found, heard = list[Info](), set[str]()
    while True:
        fresh = [answer for answer in ask(envelope(message, heard, world_size)) if "engine" in answer]
        fresh = [answer for answer in fresh if answer["engine"] not in heard]
        if not fresh:
            return found
        found += fresh
        heard |= {answer["engine"] for answer in fresh}


def out_of_step(**more: Any) -> EngineRefusedError:
    """Return the error for a vLLM that answers a call with what its workers replied to another one."""
    return EngineRefusedError(
        "replies of the workers are out of step: vLLM answered with those to another call",
        expected="the replies to this call; a call that failed left some unread",
        hint="restart the engine",
        **more,
    )


def escaped(words: str) -> str:
    """Escape the slashes in a worker's message, because vLLM's server replaces every path in an error with ``<path>``.

    See `sanitize_message` in vLLM 0.32. ``\\/`` is ``/`` in JSON, so JSON stays valid. `unescaped` reverses it.
    """
    return words.replace("/", "\\/")


def unescaped(words: str) -> str:
    """Reverse `escaped`; text that was not escaped stays as it is."""
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
    """Yield the JSON objects after each `ANSWERS`, or between bars, as in answers of SGLang's data-parallel ranks."""
    pieces = text.split(ANSWERS)[1:] or text.split(" | ")
    for piece in pieces:
        try:
            found, _ = json.JSONDecoder().raw_decode(piece.strip())
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            yield found


def bears_key(authorization: str | None, keys: Collection[str]) -> bool:
    """Return whether ``keys`` is empty or the ``Authorization`` header is ``Bearer`` and one of them.

    The comparison takes constant time.
    """
    scheme, _, credentials = (authorization or "").partition(" ")
    given = credentials.strip().encode()
    matches = [secrets.compare_digest(given, key.encode()) for key in keys]
    return not keys or (scheme.lower() == "bearer" and any(matches))


class Guard:
    """ASGI middleware that refuses requests without the key, of web pages, and with a body of other types or sizes.

    A page of any site can make its reader's browser post to a loopback address. The browser then sends the page's
    ``Origin``, and asks the server's permission before it sends JSON; vLLM and SGLang give that to everybody.

    Args:
        app: the application behind it.
        keys: a request needs one of them, if there are any; they may be filled in later.
        open_routes: paths that need no key.
    """

    def __init__(self, app: _Asgi, keys: Collection[str] = (), open_routes: Collection[str] = ()) -> None:
        self._app, self._keys, self._open_routes = app, keys, open_routes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection."""
        refused, size = self._refused(scope) if scope["type"] == "http" else None, 0

        async def bounded() -> Any:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BODY_BYTES:
                raise ConfigError(f"the body has more than {MAX_BODY_BYTES} bytes", state="unchanged")
            return message

        if refused is None:
            await self._app(scope, bounded, send)
            return
        status, kind, words = refused
        body = {"error": {"message": words, "type": kind, "param": None, "code": status}}  # as vLLM's errors
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    def _refused(self, scope: Any) -> tuple[int, str, str] | None:
        """Return the status, type and words with which a request is refused; None if it is not."""
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["path"] not in self._open_routes and not bears_key(headers.get("authorization"), self._keys):
            return 401, "Unauthorized", "this route requires the engine's API key"
        if scope["method"] == "POST" and "origin" in headers:
            return 403, "Refused", FROM_A_PAGE
        if has_body and kind != "application/json":
            words = f"the body is of type {kind or 'unknown'!r}; send content-type: application/json"
            return 415, "Refused", words
        return None
