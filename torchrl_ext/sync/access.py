"""Who may call the routes that are ours, whichever server they lie in."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Any

__all__ = ["bears_key", "refusal"]


def bears_key(authorization: str | None, keys: Collection[str]) -> bool:
    """Whether a request may pass: there are no keys, or its ``Authorization`` header is ``Bearer`` and one of them.

    Keys are compared in constant time.
    """
    scheme, _, told = (authorization or "").partition(" ")
    given = told.strip().encode()
    matches = [secrets.compare_digest(given, key.encode()) for key in keys]
    return not keys or (scheme.lower() == "bearer" and any(matches))


def refusal() -> dict[str, Any]:
    """The body of a 401, in vLLM's shape of an error."""
    row = {"message": "this route wants the engine's API key", "type": "Unauthorized", "param": None, "code": 401}
    return {"error": row}
