"""Entry point of group ``vllm.general_plugins``: adds the weight-transfer backend ``torchrl_ext`` to a stock vLLM.

vLLM calls `register` in its API, core and worker processes; only the worker ever imports the backend itself. Start the
server with ``--weight-transfer-config '{"backend": "torchrl_ext"}'`` and ``VLLM_SERVER_DEV_MODE=1``. An engine object
that was made with another backend, or with none, gets ours by the collective call `TAKE_OVER`, which workers get here.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from torchrl_ext.messages import partial_version
from torchrl_ext.plugins.found import enable, grant_tiles
from torchrl_ext.routes import BACKEND, TAKE_OVER

__all__ = ["register"]

_TESTED = "0.32.0"


def register() -> None:
    """Register the backend with vLLM. May be called any number of times.

    vLLM calls it outside any ``try``, in every process of every server of the environment that has this package: what a
    release does not have is logged, and nothing is raised.
    """
    needed = {
        "bfloat16 may end in SIGILL on this CPU": grant_tiles,
        "it follows no trainer by our transports": _register_backend,
        "vime's trainers cannot have it pull versions": _add_pull,
        "an engine that was made without our backend cannot get it": _offer_backend,
        "whoever resumes it may let it serve a part of an update": _guard_resume,
    }
    if os.environ.get("TORCHRL_EXT_PLAIN_LINEARS") == "1":
        needed["TORCHRL_EXT_PLAIN_LINEARS has no effect"] = _keep_linears_plain
    enable("vLLM", "vllm", _TESTED, needed)


def _register_backend() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(BACKEND, "torchrl_ext.plugins.vllm.engine", "TorchRLExtEngine")
    except ValueError:
        return  # registered by an earlier call


def _add_pull() -> None:
    """Give workers the method ``pull_weights``, which remember their checkpoint and notice when vLLM loads another.

    vLLM's own ``reload_weights`` puts the path that it loads in place of the one that the worker was started with. So
    `WorkerBase.__init__` is wrapped, and each worker's ``reload_weights``. Where vime's patch has put ``pull_weights``
    there, that one stays.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    begin = WorkerBase.__init__
    if getattr(begin, "__module__", "") == __name__:
        return  # wrapped by an earlier call

    def init(worker: Any, *args: Any, **settings: Any) -> None:
        begin(worker, *args, **settings)
        worker.started_with = str(worker.model_config.model)
        reload = getattr(worker, "reload_weights", None)
        if reload is not None:
            worker.reload_weights = functools.partial(_reload, worker, reload)

    WorkerBase.__init__ = init
    if "pull_weights" not in vars(WorkerBase):
        WorkerBase.pull_weights = _pull


def _pull(
    worker: Any, local_checkpoint_dir: str, source_dir: str, target_version: int, pre_read_hook: str | None = None
) -> dict[str, Any]:
    from torchrl_ext.plugins.vllm.pull import pulled

    told = {"local_checkpoint_dir": local_checkpoint_dir, "source_dir": source_dir, "target_version": target_version}
    return pulled(worker, worker.started_with, told, pre_read_hook)


def _reload(worker: Any, reload: Callable[..., None], *args: Any, **settings: Any) -> None:
    from torchrl_ext.plugins.vllm.pull import reloaded

    whole = False
    try:
        reload(*args, **settings)
        whole = True
    finally:
        reloaded(worker, whole=whole)


def _offer_backend() -> None:
    """Add the method `TAKE_OVER` to vLLM's workers."""
    from vllm.v1.worker.worker_base import WorkerBase

    setattr(WorkerBase, TAKE_OVER, _take_over)


def _take_over(worker: Any) -> None:
    """Give a worker our backend in place of the one that it was made with, if any. May be called any number of times.

    Raises:
        RuntimeError: an update through the other backend is open; all workers of an engine raise it, or none.
    """
    from vllm.config import WeightTransferConfig

    from torchrl_ext.plugins.vllm.engine import TorchRLExtEngine

    other = worker.weight_transfer_engine
    if isinstance(other, TorchRLExtEngine):
        return
    if worker._weight_update_active:
        raise RuntimeError("an update of another trainer is open: end it before this engine follows a new one")
    config, model = WeightTransferConfig(backend=BACKEND), worker.model_runner.get_model()
    worker.weight_transfer_engine = TorchRLExtEngine(config, worker.vllm_config, worker.device, model)
    if other is not None:
        other.shutdown()


_WHOLE = "torchrl_ext_whole"
"""The collective call that asks vLLM's workers whether they may generate."""


def _guard_resume() -> None:
    """Keep an engine paused that holds a part of an update, whoever calls ``/resume`` or ``/wake_up``."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerBase

    if _WHOLE in vars(WorkerBase):
        return
    EngineCore.resume_scheduler = _refusing_parts(EngineCore.resume_scheduler)
    setattr(WorkerBase, _WHOLE, _is_whole)


def _refusing_parts(resume: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(resume)
    def resumed(core: Any) -> None:
        if not all(core.model_executor.collective_rpc(_WHOLE)):
            raise partial_version("the engine")
        resume(core)

    return resumed


def _is_whole(worker: Any) -> bool:
    """Return whether a worker holds one version, whole; of another backend than ours nobody knows better."""
    ours = sys.modules.get("torchrl_ext.plugins.vllm.engine")  # there, once a worker has our backend
    engine = getattr(worker, "weight_transfer_engine", None)
    return ours is None or not isinstance(engine, ours.TorchRLExtEngine) or engine.whole


def _keep_linears_plain() -> None:
    """Make a CPU vLLM keep linear weights as they are on a GPU: plain tensors that can be written in place.

    Both kinds of packing are switched off before a model is loaded. This serves to try what a GPU engine does.
    """
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.utils as layers

    _ = ops._supports_onednn, layers.check_cpu_sgl_kernel  # raises where they are absent: setting them would do nothing
    ops._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda *_: False
