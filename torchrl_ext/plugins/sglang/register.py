"""Entry point of group ``sglang.srt.plugins``, by which a stock SGLang follows our transports and ``"delta"`` loads.

SGLang (0.5.13 and later) calls `register` in each of its processes and then applies the hooks. They run in schedulers,
which hold the model, and in the process that looks up adapters by name (`torchrl_ext.plugins.sglang.adapters`):

* ``/weights_checker`` reaches every worker, between two steps of generation, whether the server is paused or not, and
  carries a free string: the ``action``. Ours begin with `torchrl_ext.routes.CHANNEL`; a server without the plugin
  says "Unsupported action" and goes on. What they do is in `torchrl_ext.plugins.sglang.worker`.
* ``/update_weights_from_disk`` with ``load_format="delta"`` lands a version directory, or the newest one of a root.

An exception that leaves a scheduler ends the server (0.5.23), so none leaves these hooks: a checkpoint that SGLang
itself cannot load, or a ``load_format`` that it does not know, becomes an answer as well. Hooks around its other
load methods only note that the model was loaded past us.
"""

from __future__ import annotations

import json
import logging
import os
import pkgutil
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torchrl_ext.errors import ConfigError, EngineError
from torchrl_ext.messages import CheckAdapter, Prefetch, read
from torchrl_ext.plugins.found import enable, grant_tiles
from torchrl_ext.plugins.sglang import adapters as sglang_adapters
from torchrl_ext.plugins.sglang import routes as sglang_routes
from torchrl_ext.routes import CHANNEL

__all__ = ["register"]

log = logging.getLogger("torchrl_ext")

_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_PAST_US = ("update_weights_from_", "load_weights_from_")
"""The first letters of the names of SGLang's other load methods, which differ between releases."""

_TESTED = "0.5.23"

_workers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_started_with: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""The checkpoint that each model was loaded from first: SGLang's own record is of the last one."""
_held: weakref.WeakSet[Any] = weakref.WeakSet()
"""Schedulers that `_hold_parts` paused."""
_loaded: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models that SGLang loaded past us before they had a worker of ours."""
_unseen: list[str] = []
"""Why calls of SGLang's own load methods go unnoticed, if they do: what a worker knows of its weights may be wrong."""


def register() -> None:
    """Register the hooks. May be called any number of times; what a release does not have is logged."""
    needed = {
        "bfloat16 may end in SIGILL on this CPU": grant_tiles,
        "it follows no trainer by our transports": _register_hooks,
        "its own ways to load cannot be seen, so that every version has to be a full one": _see_loads,
    }
    if os.environ.get("TORCHRL_EXT_UNPINNED") == "1":
        needed["LoRA may need a GPU"] = _pin_nothing
    enable("SGLang", "sglang", _TESTED, needed)


def _register_hooks() -> None:
    """Register each hook whose target this release has; the one that is indispensable is looked for first.

    Raises:
        AttributeError, ImportError: there is no `check_weights`, which our messages come by, or no registry of hooks.
    """
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    pkgutil.resolve_name(f"{_MANAGER}.check_weights")
    unseen, ways = "", []
    try:
        ways = [name for name in dir(pkgutil.resolve_name(_UPDATER)) if name.startswith(_PAST_US)]
    except (ImportError, AttributeError) as error:
        unseen = f"there is no {_UPDATER}: {error}"
    _unseen[:] = [unseen] if unseen else []
    hooks: dict[str, Callable[..., Any]] = {
        f"{_MANAGER}.check_weights": check_weights,
        f"{_SCHEDULER}.continue_generation": continue_generation,
        **{f"{_UPDATER}.{name}": load_past_us for name in ways},
        f"{_UPDATER}.update_weights_from_disk": update_weights_from_disk,
        **sglang_adapters.HOOKS,
        **sglang_routes.HOOKS,
        f"{_MANAGER}.update_weights_from_disk": load_from_disk,
        **({} if torch.accelerator.is_available() else _WITHOUT_GPU),
    }
    absent = []
    for target, hook in hooks.items():
        known = any(registered is hook for _, registered, _ in HookRegistry._hooks.get(target, ()))
        if not _exists(target):
            absent.append(target)
        elif not known:
            HookRegistry.register(target, hook, HookType.AROUND)
    if absent:
        log.info("this SGLang has no %s", ", ".join(absent))


def _see_loads() -> None:
    if _unseen:
        raise AttributeError(_unseen[0])


def _pin_nothing() -> None:
    """Let SGLang's LoRA run on a machine without a GPU: its layers ask for pinned memory (0.5.23), which needs one."""
    import torch

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, pin_memory=False, **settings: make(*args, **settings)

    if not torch.accelerator.is_available():
        for name in ("tensor", "empty", "zeros"):
            setattr(torch, name, unpinned(getattr(torch, name)))
        torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]  # that is meant


def check_weights(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Wrap the scheduler's part of ``/weights_checker``: do what our messages say, and pass on any other call."""
    if not str(request.action).startswith(CHANNEL):
        return original(manager, request)
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    try:
        runner = manager.tp_worker.model_runner
        message = read(json.loads(request.action.removeprefix(CHANNEL)))
        if isinstance(message, (CheckAdapter, sglang_adapters.CheckLoaded)):
            failure = _united(lambda: sglang_adapters.check_worker(runner.lora_manager, message))
            return CheckWeightsReqOutput(success=not failure, message=failure)
        worker = _worker(runner)
        if _unseen and isinstance(message, Prefetch):  # the first message of an update
            worker.invalidate()
        success, answer = worker.answer(message, manager)
    except Exception as error:  # noqa: BLE001 - it would end the server
        success, answer = False, f"{type(error).__name__}: {error}"
    # half of a surrogate pair, which JSON can name, could not be encoded when the scheduler sends its answer
    return CheckWeightsReqOutput(success=success, message=answer.encode("utf-8", "replace").decode())


def continue_generation(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the scheduler's part of ``/continue_generation``: one that holds a part of an update stays paused."""
    words = ""
    try:
        words = _united(lambda: _refuse_parts(scheduler))  # on all workers of this server, or on none
    except Exception:  # it would end the server
        log.exception("it is not known whether this server holds a part of a weight update")
    if words:
        log.error("the server was told to continue, and stays paused: %s", words)
        scheduler._engine_paused = True  # not so before, where requests were aborted
        return None
    return original(scheduler, *args, **kwargs)


def load_from_disk(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Wrap the scheduler's part of ``/update_weights_from_disk``: after one that failed, no part of it is served."""
    try:
        return sglang_routes.load(original, manager, request)
    finally:
        _hold_parts(manager)


def _hold_parts(manager: Any) -> None:
    """Pause a server in which a load has failed half-way, so that it serves no part of a version.

    The next load that arrives whole lets it go on, unless a caller paused it.
    """
    try:
        scheduler = manager.scheduler
        if _united(lambda: _refuse_parts(scheduler)):
            if not scheduler._engine_paused:
                _held.add(scheduler)
            scheduler._engine_paused = True
        elif scheduler in _held:
            _held.discard(scheduler)
            scheduler._engine_paused = False
    except Exception:  # it would end the server
        log.exception("it is not known whether this server holds a part of a weight update")


def _refuse_parts(scheduler: Any) -> None:
    """Raise EngineError where a model holds a part of an update, or SGLang's own session for one is open."""
    worker = _workers.get(scheduler.tp_worker.model_runner.model)
    if worker is not None:
        worker.refuse_parts()
    if getattr(getattr(scheduler, "weight_updater", None), "_session", None) is not None:
        raise EngineError("a session for an update of weights is open", hint="POST /end_weight_update first")


def update_weights_from_disk(
    original: Callable[..., Any], updater: Any, model_path: str, load_format: str, *args: Any, **kwargs: Any
) -> tuple[bool, str]:
    """Wrap one worker's part of ``/update_weights_from_disk``: land deltas, and let SGLang load anything else."""
    try:
        runner = updater.get_model_runner()
        _start_of(runner)
        if load_format == "delta":
            if runner.is_draft_worker:
                return True, "a draft model follows no delta: it stays as it is"
            return _worker(runner).land(model_path, sglang_routes.announced())
    except Exception as error:  # noqa: BLE001 - it would end the server
        return False, f"{type(error).__name__}: {error}"
    if kwargs.get("weight_name_filter") or any(args):  # not a trainer's call
        return load_past_us(original, updater, model_path, load_format, *args, **kwargs)
    message = ""

    def load() -> None:
        nonlocal message
        success, message = load_past_us(original, updater, model_path, load_format, *args, **kwargs)
        if not success:
            raise EngineError(message)

    failure = _united(load)
    if not failure:
        if updater.get_model() in _workers:
            _workers[updater.get_model()].reloaded()
        return True, message
    return False, (
        f"{failure}. State: the model may hold part of an update. "
        "Next: load a whole version before requests are served again."
    )


def load_past_us(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap a load method of SGLang: drop what our worker knows of the model afterwards."""
    try:
        return original(updater, *args, **kwargs)
    finally:
        model = updater.get_model()
        if model in _workers:
            _workers[model].invalidate()
        else:
            _loaded.add(model)


def _united(step: Callable[[], None]) -> str:
    """Take a step on every worker; return what went wrong, in words, or "" where it went well on all of them."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    from torchrl_ext.plugins.workers import agree
    from torchrl_ext.sync.worker_end import joined, words_of

    words = ""
    try:
        step()
    except Exception as error:  # noqa: BLE001 - it would end the server
        words = words_of(error)
    said = agree(words, get_tp_group().cpu_group)  # SGLang would return the first worker's answer alone
    return joined(said) if any(said) else ""


def _worker(runner: Any) -> Any:
    """Return the `SGLangWorker` that keeps this runner's model up to date; there is one per model and process."""
    from sglang.srt.distributed.parallel_state import get_pp_group, get_tp_group

    from torchrl_ext.plugins.refusals import UNCHANGED, rebalanced
    from torchrl_ext.plugins.sglang.worker import SGLangWorker

    model = runner.model
    if model not in _workers:
        rejection = None if getattr(runner, "eplb_manager", None) is None else rebalanced()
        if get_pp_group().world_size > 1:
            rejection = ConfigError(
                "the plugin does not know engines with pipeline stages", expected="--pp-size 1", state=UNCHANGED
            )
        worker = SGLangWorker(
            model,
            _start_of(runner),
            get_tp_group().cpu_group,
            dummy=str(runner.server_args.load_format) == "dummy",
            rejection=rejection,
        )
        if model in _loaded:
            worker.invalidate()
        _workers[model] = worker
    return _workers[model]


def _start_of(runner: Any) -> str:
    """Return the checkpoint that a runner's model was loaded from first; called before any other is."""
    from torchrl_ext.weights.checkpoint import revised

    config = runner.model_config
    return _started_with.setdefault(runner.model, revised(config.model_path, getattr(config, "revision", None)))


def _exists(target: str) -> bool:
    """Return whether this SGLang has what a hook would wrap."""
    try:
        return pkgutil.resolve_name(target) is not None
    except Exception:
        log.debug("%s cannot be imported", target, exc_info=True)
        return False


# what SGLang (0.5.23) needs to compute on a machine without a GPU, beyond what its own start does there

_HANDLERS = "sglang.srt.models.deepseek_common.attention_backend_handler"


def load_model(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap `ModelRunner.load_model`, so that latent attention is computed in its absorbed form for new prompts as well.

    The backend ``torch_native`` reads keys and values from the cache alone, which holds latents. SGLang's table of how
    backends compute DeepSeek's attention has no entry for it, so that it is taken for Triton's, which gets full keys.
    """
    found = original(runner, *args, **kwargs)
    handlers = sys.modules.get(_HANDLERS)  # present where a model of that family was imported
    try:
        if handlers is not None and "torch_native" not in handlers.AttentionBackendRegistry._handlers:
            absorbed = handlers.AttnForwardMethod.MLA
            handlers.AttentionBackendRegistry.register("torch_native", lambda attention, batch: absorbed)
    except AttributeError:
        log.warning("this SGLang keeps its attention methods elsewhere: DeepSeek may not run on a CPU")
    return found


def experts(original: Callable[..., Any], layer: Any, x: Any, topk_output: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap `moe_forward_native`, which takes the -1 of another worker's expert (expert parallelism) for an index.

    Such a token goes to the first expert of this worker, with weight zero. As the function counts a token once per
    expert, each of a token's choices is computed in a call of its own.
    """
    if getattr(layer, "moe_ep_size", 1) == 1:
        return original(layer, x, topk_output, *args, **kwargs)
    elsewhere = topk_output.topk_ids < 0
    ids = topk_output.topk_ids.masked_fill(elsewhere, 0).split(1, dim=1)
    weights = topk_output.topk_weights.masked_fill(elsewhere, 0).split(1, dim=1)
    parts = [
        original(layer, x, topk_output._replace(topk_ids=own, topk_weights=weight), *args, **kwargs)
        for own, weight in zip(ids, weights, strict=True)
    ]
    return sum(parts[1:], parts[0])


_WITHOUT_GPU: dict[str, Callable[..., Any]] = {
    "sglang.srt.model_executor.model_runner.ModelRunner.load_model": load_model,
    "sglang.srt.layers.moe.fused_moe_native.moe_forward_native": experts,
}
