"""Entry point of group ``vllm.general_plugins``: adds the weight-transfer backend ``torchrl_ext`` to a stock vLLM.

vLLM calls `register` in its API, core and worker processes; only the worker ever imports the backend itself. Start the
server with ``--weight-transfer-config '{"backend": "torchrl_ext"}'`` and ``VLLM_SERVER_DEV_MODE=1``.
"""

from __future__ import annotations

import os

from torchrl_ext.messages import BACKEND
from torchrl_ext.plugins.found import enable, grant_tiles

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


def _keep_linears_plain() -> None:
    """Make a CPU vLLM keep linear weights as they are on a GPU: plain tensors that can be written in place.

    Both kinds of packing are switched off before a model is loaded. This serves to try what a GPU engine does.
    """
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.utils as layers

    _ = ops._supports_onednn, layers.check_cpu_sgl_kernel  # raises where they are absent: setting them would do nothing
    ops._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda *_: False
