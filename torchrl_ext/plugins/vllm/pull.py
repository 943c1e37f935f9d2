"""The worker's method that vime's trainers call by ``POST /collective_rpc``: ``pull_weights``.

It works beside any weight-transfer backend, and vime's own patch of vLLM wins over it. vLLM runs it in the loop of its
workers: no token is made meanwhile, other than with ``POST /pull_weights`` (`torchrl_ext.plugins.vllm.endpoint`).
"""

from __future__ import annotations

import os
from typing import Any

from torchrl_ext.errors import ConfigError, EngineError
from torchrl_ext.messages import Pull
from torchrl_ext.plugins.vllm.engine import TorchRLExtEngine, told_all
from torchrl_ext.routes import escaped
from torchrl_ext.sync.worker_end import joined, pull, words_of
from torchrl_ext.types import Info
from torchrl_ext.versions.hooks import PRE_READ_HOOK

__all__ = ["pulled", "reloaded"]


def pulled(worker: Any, base: str, told: Info, hook: str | None) -> Info:
    """Bring the checkpoint on this worker's host to a version; workers agree, and the last one alone raises.

    Args:
        worker: of vLLM.
        base: the checkpoint that it was started with.
        told: ``local_checkpoint_dir``, ``source_dir`` and ``target_version``.
        hook: what the trainer calls the engine's hook, if it does.

    Raises:
        EngineError: it failed on a worker; in the words of all.
    """
    words = ""
    try:
        if hook is not None and hook != os.environ.get(PRE_READ_HOOK):  # no caller names code to run here
            raise ConfigError(
                f"the call names a hook {hook!r:.80}, which is not the one that the engine was started with",
                state="nothing was read",
                hint=f"start the engine with {PRE_READ_HOOK}={hook:.80}",
            )
        pull(Pull.of(told), base)
    except Exception as error:  # noqa: BLE001 - told to the others, whatever it is
        words = words_of(error)
    failures = told_all(words)
    parallel = worker.vllm_config.parallel_config
    if any(failures) and parallel.rank == parallel.world_size - 1:
        raise EngineError(escaped(joined(failures)))
    return {"success": not any(failures), "weight_version": str(told.get("target_version"))}


def reloaded(worker: Any, *, whole: bool) -> None:
    """Note that vLLM loaded the worker's model by itself, where our backend keeps it up to date.

    Args:
        whole: it loaded a checkpoint to its end.
    """
    engine = getattr(worker, "weight_transfer_engine", None)
    if isinstance(engine, TorchRLExtEngine):
        engine.invalidate(whole=whole)
