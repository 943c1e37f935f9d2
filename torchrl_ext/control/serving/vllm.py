"""Run a stock vLLM server with our plugin, or vLLM's router, as a child process."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torchrl_ext.control.serving.processes import GuardedProcess
from torchrl_ext.control.serving.server import EngineSpec, RouterSpec, as_flags, start

__all__ = ["VLLMRouterSpec", "VLLMServer", "VLLMSpec"]


@dataclass(frozen=True, kw_only=True)
class VLLMSpec(EngineSpec):
    """The settings of a vLLM server.

    On a CPU, tensor-parallel workers share the cores unless ``OMP_NUM_THREADS`` is set.
    """

    name: ClassVar[str] = "vllm"
    module: ClassVar[str] = "vllm.entrypoints.openai.api_server"
    installed: ClassVar[str] = "name an interpreter that has it (python=...), or run `torchrl-ext serve vllm`"

    plugin: bool = True

    @classmethod
    def role(cls, worker_type: str) -> dict[str, Any]:
        roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
        if worker_type not in roles:
            return {}
        return {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": roles[worker_type]}}

    def command(self, port: int) -> list[str]:
        arguments = {
            "model": self.model,
            "host": self.host,
            "port": port,
            "dtype": self.dtype,
            "tensor-parallel-size": self.tensor_parallel_size,
            "max-model-len": self.max_model_len,
            "served-model-name": "policy",
        }
        command = [str(self.interpreter), "-m", self.module, *as_flags(arguments)]
        command.append("--enable-scale-out")  # /inference/v1/generate
        command += ["--enforce-eager"] if self.on_cpu else ["--enable-sleep-mode"] if self.sleep_mode else []
        return [*command, *self.extra_args]

    def variables(self) -> dict[str, str]:
        # an allow-list, as vLLM adds routes only of plugins on it; it passes over those that an environment lacks
        others = os.environ.get("VLLM_PLUGINS", ",".join(_installed_plugins(self.interpreter)))
        environ = {
            "VLLM_SERVER_DEV_MODE": "1",  # required for /collective_rpc and vLLM's RL routes
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_PLUGINS": f"{others},torchrl_ext,torchrl_ext_cpu",
        }
        environ |= {} if self.api_key is None else {"VLLM_API_KEY": self.api_key}
        if self.on_cpu:
            own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # GiB
            if self.tensor_parallel_size > 1:
                # unbound, every worker would start a thread per core, and the threads would spin while they wait
                own["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // self.tensor_parallel_size))
            environ |= {name: os.environ.get(name, value) for name, value in own.items()}
        return environ


@dataclass(frozen=True, kw_only=True)
class VLLMRouterSpec(RouterSpec):
    """vLLM's router (vllm-router 0.1.17)."""

    module: ClassVar[str] = "vllm_router.launch_router"
    installed: ClassVar[str] = "name an interpreter that has it (python=...), or pip install 'torchrl_ext[router]'"
    policy_of_sessions: ClassVar[str] = "consistent_hash"
    pools: ClassVar[str] = "--vllm-pd-disaggregation"  # prefill first, then decode with the connector's parameters
    more: ClassVar[tuple[str, ...]] = ("--log-level=warning",)


def VLLMServer(model_dir: str | Path, **settings: Any) -> GuardedProcess:
    """Start a stock vLLM server and wait until it is healthy; see `start`, and `VLLMSpec` for the settings."""
    return start(VLLMSpec(model_dir, **settings))


def _installed_plugins(python: Path) -> list[str]:
    """Return the names of the plugins of an environment that vLLM would load without an allow-list."""
    folders = map(str, python.parent.parent.glob("lib/python3*/site-packages"))
    found = importlib.metadata.distributions(path=sys.path if python == Path(sys.executable) else [*folders])
    points = (point for distribution in found for point in distribution.entry_points)
    return sorted({point.name for point in points if point.group.startswith("vllm.") and "endpoint" not in point.group})
