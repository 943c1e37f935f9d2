"""Entry point of group ``sglang.srt.plugins``, by which a stock SGLang follows our transports and ``"delta"`` loads.

SGLang calls `register` in each of its processes and then applies the hooks. Those of this file run in schedulers, which
hold the model; others in the process of the HTTP server (`torchrl_ext.engines.sglang.routes`).

``/weights_checker`` reaches every worker, between two steps of generation, whether the server is paused or not, and
carries a free string: the ``action``. Ours begin with `torchrl_ext.base.routes.CHANNEL`; a server without the plugin
says "Unsupported action" and goes on. What they do is in `torchrl_ext.engines.sglang.worker`.

An exception that leaves a scheduler ends the server (0.5.23), so none leaves these hooks. Those around SGLang's own
load methods only note that the model was loaded past us.
"""

from __future__ import annotations

import functools
import json
import logging
import pkgutil
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torchrl_ext.base.errors import EngineError, WeightSyncError
from torchrl_ext.base.messages import Message, Reset, answered, partial_version
from torchrl_ext.base.routes import CHANNEL
from torchrl_ext.base.types import Info
from torchrl_ext.engines.plugin import enable, started_with
from torchrl_ext.engines.sglang import keys
from torchrl_ext.engines.sglang import routes as sglang_routes

__all__ = ["register"]

log = logging.getLogger("torchrl_ext")

_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_PAST_US = ("update_weights_from_", "load_weights_from_")
"""The first letters of the names of SGLang's other load methods."""

_workers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_loaded: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models that SGLang loaded past us before they had a worker of ours."""
_relabelled: weakref.WeakKeyDictionary[Any, tuple[Any, Callable[[], None]]] = weakref.WeakKeyDictionary()
"""By scheduler: the last batch that ran on weights whose label has changed, and what records that change."""


@functools.cache
def register() -> None:
    """Register the hooks. May be called any number of times."""
    enable("SGLang 0.5.23", lambda: _wrap({**_worker_hooks(), **_label_hooks(), **sglang_routes.HOOKS}))


def _wrap(hooks: Mapping[str, Callable[..., Any]]) -> None:
    """Register hooks by what they wrap, all of them or none."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target in hooks:
        pkgutil.resolve_name(target)
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def _worker_hooks() -> dict[str, Callable[..., Any]]:
    ways = [name for name in dir(pkgutil.resolve_name(_UPDATER)) if name.startswith(_PAST_US)]
    return {
        f"{_MANAGER}.check_weights": check_weights,
        f"{_MANAGER}.release_memory_occupation": release_memory_occupation,
        f"{_SCHEDULER}.continue_generation": continue_generation,
        **{f"{_UPDATER}.{name}": load_past_us for name in ways},
        f"{_UPDATER}.update_weights_from_disk": update_weights_from_disk,
    }


def _label_hooks() -> dict[str, Callable[..., Any]]:
    return {
        f"{_SCHEDULER}.record_weight_version_change": record_weight_version_change,
        f"{_SCHEDULER}.process_batch_result": process_batch_result,
        f"{_SCHEDULER}._add_request_to_queue": keys.add_request_to_queue,
    }


def check_weights(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Wrap the scheduler's part of ``/weights_checker``: do what our messages say, and pass on any other call."""
    if not str(request.action).startswith(CHANNEL):
        return original(manager, request)
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    def handle(message: Message) -> Info:
        return dict(_worker(manager.tp_worker.model_runner).answer(message, manager))

    words = json.dumps(answered(handle, request.action.removeprefix(CHANNEL)))
    return CheckWeightsReqOutput(success=True, message=words.replace("|", "\\u007c"))  # SGLang joins answers by it


def release_memory_occupation(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Wrap the scheduler's part of ``/release_memory_occupation``: first, no thread of ours reads the weights."""
    model = manager.tp_worker.model_runner.model
    if model in _workers:
        try:
            _workers[model].end.stop()
        except Exception:  # it would end the server
            log.exception("a thread may still read the weights")
    return original(manager, request)


def continue_generation(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the scheduler's part of ``/continue_generation``: one that holds a part of an update stays paused."""
    words = _refuses(scheduler)
    if words:
        log.error("the server was asked to continue but stays paused: %s", words)
        scheduler._engine_paused = True  # not so before, where requests were aborted
        return None
    worker = _workers.get(scheduler.tp_worker.model_runner.model)
    if worker is not None:
        worker.end.receiver.give_up()
    return original(scheduler, *args, **kwargs)


def record_weight_version_change(original: Callable[..., None], scheduler: Any, new_version: str | None) -> None:
    """Wrap the scheduler's record of a new label: tokens of a batch that is launched already have the old one.

    Without a pause, and in one in place, its result is queued where batches overlap, and SGLang counts known tokens.
    """
    record, queued = functools.partial(original, scheduler, new_version), getattr(scheduler, "result_queue", None)
    if not queued:
        record()
    elif new_version is not None:
        _relabelled[scheduler] = queued[-1][0], record


def process_batch_result(original: Callable[..., None], scheduler: Any, batch: Any, result: Any) -> None:
    """Wrap the scheduler's work on a result: after the last one of old weights it records their new label."""
    original(scheduler, batch, result)
    last, record = _relabelled.get(scheduler, (None, None))
    if record is None or batch is not last:
        return
    del _relabelled[scheduler]
    waiting = scheduler.waiting_queue
    # some of the next batch may have left the queue with tokens of their own: requests that were retracted
    scheduler.waiting_queue = [*waiting, *(request for ahead, _ in scheduler.result_queue for request in ahead.reqs)]
    try:
        record()
    finally:
        scheduler.waiting_queue = waiting


def _refuses(scheduler: Any) -> str:
    """Return why a server may not generate, the same on all of its workers: "" where it may, or where nobody knows.

    It may not where a model holds a part of an update, or SGLang's own session for one is open.
    """
    from sglang.srt.distributed.parallel_state import get_tp_group

    from torchrl_ext.engines.plugin import agree
    from torchrl_ext.sync.engine_worker import together

    def refuse() -> None:
        worker = _workers.get(scheduler.tp_worker.model_runner.model)
        if worker is not None and not worker.end.receiver.whole:
            raise partial_version("the engine")
        if getattr(getattr(scheduler, "weight_updater", None), "_session", None) is not None:
            raise EngineError("a session for an update of weights is open", hint="POST /end_weight_update first")

    try:
        together(lambda words: agree(words, get_tp_group().cpu_group), refuse)
    except WeightSyncError as error:
        return str(error)
    except Exception:  # it would end the server
        log.exception("this server may hold a part of a weight update")
    return ""


def update_weights_from_disk(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap one worker's part of ``/update_weights_from_disk``, whose whole checkpoints are no part of an update."""
    runner = updater.get_model_runner()
    started_with(runner.model, runner.model_config)  # before SGLang's own record changes
    found = load_past_us(original, updater, *args, **kwargs)
    if runner.model in _workers:
        receiver = _workers[runner.model].end.receiver
        receiver.invalidate(torn=not found[0])
        if found[0] and not kwargs.get("weight_name_filter"):
            receiver.handle(Reset(weights="reloaded"))
    return found


def load_past_us(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap a load method of SGLang: drop what our worker knows of the model afterwards."""
    try:
        return original(updater, *args, **kwargs)
    finally:
        model = updater.get_model()
        if model in _workers:
            _workers[model].end.receiver.invalidate()
        else:
            _loaded.add(model)


def _worker(runner: Any) -> Any:
    """Return the `SGLangWorker` that keeps this runner's model up to date; there is one per model and process."""
    from torchrl_ext.engines.sglang.worker import SGLangWorker

    model = runner.model
    if model not in _workers:
        worker = SGLangWorker(runner)
        if model in _loaded:
            worker.end.receiver.invalidate()
        _workers[model] = worker
    return _workers[model]
