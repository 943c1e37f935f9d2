"""What engines' routes and their clients share: merging of answers, SGLang's channel, the guard of our routes."""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from torchrl_ext.base.errors import ConfigError, EngineRefusedError
from torchrl_ext.base.messages import Message
from torchrl_ext.base.reports import least
from torchrl_ext.base.types import Info

__all__ = [
    "CALL",
    "CHANNEL",
    "FROM_A_PAGE",
    "MAX_BODY_BYTES",
    "Flush",
    "Guard",
    "bears_key",
    "called",
    "confirmed",
    "merged",
    "salted",
    "version_label",
]

CALL = "torchrl_ext"
"""The method of vLLM's workers that takes a message as JSON and returns the answer (`torchrl_ext.base.messages`)."""

CHANNEL = "torchrl_ext:"
"""Prefix of our messages to SGLang, which are sent as the ``action`` of its ``/weights_checker``."""

MAX_BODY_BYTES = 64 << 20
"""The most that a body may have: far more than a hundred thousand parameters with long names need."""

FROM_A_PAGE = "web pages may not call this engine: the request has the header Origin"
"""Words of a refusal."""

_Asgi = Callable[..., Awaitable[None]]

_IF_ANY, _IF_ALL = ("working", "needed", "empty", "paused"), ("flushed", "restored", "whole")


class Flush(Message, frozen=True, kw_only=True):
    """Tells SGLang to flush its KV cache; the answer has ``flushed``, which is false while requests use the cache."""


def called(message: Message) -> Info:
    """Return the body of ``POST /collective_rpc`` for a message, as vLLM and the embedded engine take it.

    vLLM hands on strings only, calls the method on every worker between two steps, and answers ``{"results": [...]}``
    with the worker's answers in order of rank.
    """
    return {"method": CALL, "args": [json.dumps(message.to_json())]}


def merged(answers: Sequence[Info]) -> Info:
    """Merge answers of workers or replicas: flags by any or all, ``proof`` by the weakest, other fields by the last.

    Of ``obstacle``, the first that is not empty.
    """
    found = {name: value for answer in answers for name, value in answer.items()}
    found |= {name: any(answer.get(name) for answer in answers) for name in _IF_ANY if name in found}
    found |= {name: all(answer.get(name, True) for answer in answers) for name in _IF_ALL if name in found}
    if "obstacle" in found:
        found["obstacle"] = next((answer["obstacle"] for answer in answers if answer.get("obstacle")), "")
    if "proof" in found:
        found["proof"] = least(str(answer["proof"]) for answer in answers if "proof" in answer)
    return found


def confirmed(answers: Sequence[Info], engines: int, where: str) -> list[Info]:
    """Return the answers of vLLM's workers to a `Finish`, one per worker, if they are of all ``engines`` at an address.

    Data-parallel replicas are engines, each with workers that agree; vLLM's own client hands on the first one's.

    Raises:
        EngineRefusedError: some did not answer.
    """
    expected = engines * max((answer.get("workers", 1) for answer in answers), default=1)
    if len(answers) != expected:
        raise EngineRefusedError(
            f"{len(answers)} worker(s) of {where} say that they hold the version",
            expected=f"{expected}, of {engines} engine(s)",
            hint="install this package where vLLM's server runs, too: its own client hears the first replica alone",
        )
    return [*answers]


def version_label(version: int) -> str:
    """Return how an engine calls a version; 0 is the weights that it was started with, which vLLM calls so."""
    return str(version) if version else "default"


def salted(own: str | None, switches: int) -> str | None:
    """Return the namespace of a request's keys and values in a prefix cache.

    Args:
        own: the one that the request names (vLLM's ``cache_salt``, SGLang's ``extra_key``).
        switches: how often the engine has changed its weights while it served.
    """
    return f"{own or ''}|torchrl_ext={switches}" if switches else own


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
