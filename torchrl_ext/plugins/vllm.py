"""Entry point of group ``vllm.general_plugins``: adds the weight-transfer backend ``torchrl_ext`` to a stock vLLM.

vLLM calls `register` in its API, core and worker processes; only the worker ever imports the backend itself. Start the
server with ``--weight-transfer-config '{"backend": "torchrl_ext"}'`` and ``VLLM_SERVER_DEV_MODE=1``.
"""

from __future__ import annotations

import os

from torchrl_ext.types import BACKEND

__all__ = ["register"]


def register() -> None:
    """Make the backend known. May be called any number of times."""
    import torch
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if not torch.cuda.is_available() and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()  # the kernel grants AMX tiles only on request; without it bfloat16 ends in SIGILL
    if os.environ.get("TORCHRL_EXT_PLAIN_LINEARS") == "1":
        _keep_linears_plain()
    try:
        WeightTransferEngineFactory.register_engine(BACKEND, "torchrl_ext.plugins.vllm_engine", "TorchRLExtEngine")
    except ValueError:
        return  # registered by an earlier call


def _keep_linears_plain() -> None:
    """Make a CPU vLLM keep linear weights as they are on a GPU: plain tensors that can be written in place.

    Both ways in which it would pack them are switched off before a model is loaded. For trying what a GPU engine does.
    """
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.utils as layers

    ops._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda *_: False
