"""A version that a vLLM takes, or gives back, while it serves: `Commit` and `Undo`, in the core between two steps.

Both come by the collective call that carries all messages. The executor puts it behind the batches that were dispatched
before, in the one queue that each worker empties in order: those batches run on the old weights, and all later ones on
the new. Around the call the core

* labels the outputs of the batches that are still in its queue with the version that computed them, and later ones with
  the new version;
* gives requests that have not begun a new namespace of the prefix cache (`torchrl_ext.base.routes.salted`), so that
  they share no keys and values with those before; what runs goes on with its own, also after a preemption;
* takes back on all workers what failed on some, and pauses the scheduler where that fails.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from torchrl_ext.base.errors import EngineRefusedError, WeightSyncError, error_info
from torchrl_ext.base.messages import Commit, Undo, read
from torchrl_ext.base.routes import CALL, called, salted, version_label
from torchrl_ext.base.types import Info

__all__ = ["RESUMES", "switch_between_steps"]

log = logging.getLogger("torchrl_ext")

RESUMES = "torchrl_ext_resumes"
"""The collective call that asks vLLM's workers whether they may generate."""


class _Kind(msgspec.Struct):
    kind: str = ""


class _Switches:
    """What one core notes of its versions.

    Attributes:
        count: how often the weights changed while it served.
        due: the labels of the batches that were dispatched before the last change, the oldest first.
    """

    def __init__(self) -> None:
        self.count, self.due = 0, deque[str]()


def switch_between_steps() -> None:
    """Have vLLM's cores handle `Commit` and `Undo`, and name the keys of requests by the changes before them."""
    from vllm.v1.engine.core import EngineCore

    call, attach = EngineCore.collective_rpc, EngineCore._attach_weight_version
    preprocess, add = EngineCore.preprocess_add_request, EngineCore.add_request

    @functools.wraps(call)
    def collective_rpc(core: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        message = _switching(*args) if method == CALL and len(args) == 1 else None
        return call(core, method, timeout, args, kwargs) if message is None else _switch(core, message, timeout)

    @functools.wraps(attach)
    def label(core: Any, outputs: Any) -> None:  # once for each batch that leaves the queue
        attach(core, outputs)
        if due := _of(core).due:
            version = due.popleft()
            for one in outputs.values():
                one.weight_version = version

    @functools.wraps(preprocess)
    def preprocessed(core: Any, request: Any) -> Any:  # in the thread that hears requests
        own, request.cache_salt = request.cache_salt, salted(request.cache_salt, _of(core).count)
        found = preprocess(core, request)
        found[0].torchrl_ext_salt = own
        return found

    @functools.wraps(add)
    def added(core: Any, request: Any, *more: Any, **how: Any) -> None:
        _salt(request, _of(core).count)
        add(core, request, *more, **how)

    EngineCore.collective_rpc, EngineCore._attach_weight_version = collective_rpc, label
    EngineCore.preprocess_add_request, EngineCore.add_request = preprocessed, added


def _of(core: Any) -> _Switches:
    found: _Switches = vars(core).setdefault("torchrl_ext_switches", _Switches())  # the first of two threads makes it
    return found


def _switching(text: Any) -> Commit | Undo | None:
    """Return a message that changes the version; None for any other, and for what workers will refuse."""
    try:
        if msgspec.json.decode(text, type=_Kind).kind not in ("commit", "undo"):
            return None
        message = read(msgspec.json.decode(text))
    except (msgspec.DecodeError, WeightSyncError, TypeError, UnicodeError, RecursionError):
        return None
    return message if isinstance(message, (Commit, Undo)) else None


def _switch(core: Any, message: Commit | Undo, timeout: float | None) -> list[Info]:
    """Call the workers and follow them; return their answers to the message, some of which may be errors."""
    if isinstance(message, Commit) and core.is_scheduler_paused():
        error = EngineRefusedError("the engine is paused", expected="one that serves", state="nothing was changed")
        return [{"error": error_info(error)}]

    def ask(message: Commit | Undo) -> list[Info]:
        found: list[Info] = core.model_executor.collective_rpc(CALL, timeout, tuple(called(message)["args"]))
        return found

    def whole() -> bool:
        return all(core.model_executor.collective_rpc(RESUMES, timeout))

    try:
        answers = ask(message)
        version = _agreed(answers)
        if version is None:
            if all("error" in answer for answer in answers) and whole():
                return answers  # nothing was changed
            version = _agreed(ask(Undo(connection=message.connection, version=message.version)))
            if version is None or not whole():
                log.error("the engine is paused: some workers hold version %d, and others do not", message.version)
                core.pause_scheduler("keep", clear_cache=False)
                return answers
    except Exception:  # of the executor: nobody knows what the workers hold
        core.pause_scheduler("keep", clear_cache=False)
        raise
    _enter(core, version_label(version), keep_cache=isinstance(message, Commit) and message.keep_cache)
    return answers


def _agreed(answers: Sequence[Info]) -> int | None:
    """Return the version that all workers say they hold; None if one failed."""
    first, *others = {answer.get("version") for answer in answers}
    return None if others else first


def _enter(core: Any, label: str, *, keep_cache: bool) -> None:
    """Label what is computed from now on; a message that came twice changes nothing."""
    switches, before = _of(core), core.get_weight_version()
    if label == before:
        return
    in_flight = len(core.batch_queue or ())
    switches.due.extend([before] * (in_flight - len(switches.due)))
    core.set_weight_version(label)
    if not keep_cache:
        switches.count += 1
        for request in core.scheduler.requests.values():
            if not (request.num_computed_tokens or request.num_preemptions):
                _salt(request, switches.count)


def _salt(request: Any, switches: int) -> None:
    """Give a request that has not begun the namespace of these weights."""
    salt = salted(vars(request).setdefault("torchrl_ext_salt", request.cache_salt), switches)
    if request.cache_salt != salt:
        request.cache_salt = salt
        request.block_hashes.clear()
        request.update_block_hashes()
