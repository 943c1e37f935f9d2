"""Which cached keys and values a request of SGLang may use: those of the weights with which it began, or later ones.

SGLang looks for keys and values, on the device and on the host, by tokens and by a request's ``extra_key``. Whenever a
request is queued, the plugin adds how often weights have changed while the engine served
(`torchrl_ext.base.routes.salted`). So a running request goes on with its keys; one that waits at a change takes the new
name; and so does one that lost its keys to others, which SGLang calls retracted, and computes them anew.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from torchrl_ext.base.routes import salted

__all__ = ["add_request_to_queue", "drop_images", "part"]

_changes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""By scheduler: how often weights have changed while it served."""
_own: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()
"""By request: the name that it came with."""


def add_request_to_queue(original: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the scheduler's queueing of a request, of a new one or of one without keys: name its keys and values."""
    _name(scheduler, request)
    return original(scheduler, request, *args, **kwargs)


def part(scheduler: Any) -> None:
    """Let requests that begin from here on share nothing that is cached with those before."""
    _changes[scheduler] = _changes.get(scheduler, 0) + 1
    for request in scheduler.waiting_queue:
        _name(scheduler, request)
    drop_images()


def drop_images() -> None:
    """Drop the embeddings of images, which SGLang keeps by content, and leaves when it flushes its cache (0.5.23)."""
    cache = getattr(sys.modules.get("sglang.srt.managers.mm_schedule"), "embedding_cache", None)
    if cache is not None:
        cache.clear()


def _name(scheduler: Any, request: Any) -> None:
    if request.kv.holds_kv:
        return
    name = salted(_own.setdefault(request, request.extra_key), _changes.get(scheduler, 0))
    if name != request.extra_key:
        request.extra_key = name
        scheduler._record_kv_event_lora_name(request, None)  # events of the cache name an adapter by this key
