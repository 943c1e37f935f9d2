"""Run a stock SGLang server with our plugin, or SGLang's router, as a child process."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torchrl_ext.control.serving.processes import GuardedProcess, free_port
from torchrl_ext.control.serving.server import EngineSpec, RouterSpec, as_flags, start

__all__ = ["SGLangRouterSpec", "SGLangServer", "SGLangSpec"]

# --sleep-on-idle: otherwise an idle scheduler keeps one core busy
_CPU_FLAGS = ("--disable-overlap-schedule", "--disable-cuda-graph", "--sleep-on-idle")
_SLEEP_FLAGS = ("--enable-memory-saver", "--enable-weights-cpu-backup")
_CPU_ARGUMENTS = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "mem-fraction-static": "0.2",
    "max-total-tokens": "4096",
    "max-running-requests": "8",
}


@dataclass(frozen=True, kw_only=True)
class SGLangSpec(EngineSpec):
    """The settings of an SGLang server.

    Sleep mode needs `torch_memory_saver` in the server's environment. Without the plugin the server can be updated only
    from full files.

    Attributes:
        admin_api_key: the key for control; None for one key.
    """

    name: ClassVar[str] = "sglang"
    module: ClassVar[str] = "sglang.launch_server"
    installed: ClassVar[str] = "name an interpreter that has it (python=...), or run `torchrl-ext serve sglang`"
    health: ClassVar[str] = "/health_generate"  # only at the start, when nothing has paused the server
    # On a paused server /health, which generates a token, hangs for 20 s and then answers 503, unless the server has
    # SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0 (our servers have it). /ping requires the key, if any, unlike /health.
    probe: ClassVar[str] = "/ping"

    plugin: bool = True
    admin_api_key: str | None = field(default=None, repr=False)

    @classmethod
    def role(cls, worker_type: str) -> dict[str, Any]:
        if worker_type == "regular":
            return {}
        # two prefill engines on one machine would share SGLang's default port
        port = {"disaggregation_bootstrap_port": free_port()} if worker_type == "prefill" else {}
        return {"disaggregation_mode": worker_type, **port}

    def command(self, port: int) -> list[str]:
        cpu = self.on_cpu
        arguments = {
            "model-path": self.model,
            "host": self.host,
            "port": port,
            "dtype": self.dtype,
            "tp-size": self.tensor_parallel_size,
            "context-length": self.max_model_len,
            **(_CPU_ARGUMENTS if cpu else {}),
        }
        command = [str(self.interpreter), "-m", self.module, *as_flags(arguments), "--skip-server-warmup"]
        more = _CPU_FLAGS if cpu else _SLEEP_FLAGS if self.sleep_mode else ()
        return [*command, *more, *self.extra_args]

    def private(self) -> dict[str, str]:
        keys = {"api-key": self.api_key, "admin-api-key": self.admin_api_key}  # no variables set them
        return {name: key for name, key in keys.items() if key is not None}

    def variables(self) -> dict[str, str]:
        # do not import from the current folder, which may be a checkout of this library
        environ = {"PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
        environ["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"  # see `probe`: routers may ask /health
        if self.on_cpu:
            environ["SGLANG_USE_CPU_ENGINE"] = "1"
            environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "2")
            if self.tensor_parallel_size > 1:  # for others, such as replicas, name the cores in `environ`
                environ["SGLANG_CPU_OMP_THREADS_BIND"] = _cores(self.tensor_parallel_size)
        return environ


@dataclass(frozen=True, kw_only=True)
class SGLangRouterSpec(RouterSpec):
    """SGLang's router (sglang-router 0.3.2)."""

    module: ClassVar[str] = "sglang_router.launch_router"
    installed: ClassVar[str] = "name an interpreter that has it (python=...), or pip install sglang-router"
    policy_of_sessions: ClassVar[str] = "manual"  # by routing key; requests without one go anywhere
    pools: ClassVar[str] = "--pd-disaggregation"  # sends to both pools at once, with the bootstrap host, port and room
    # the router would try five times; our client has its own retry rules
    more: ClassVar[tuple[str, ...]] = ("--log-level=warn", "--disable-retries")


def SGLangServer(model_dir: str | Path, **settings: Any) -> GuardedProcess:
    """Start a stock SGLang server and wait until it is healthy; see `start`, and `SGLangSpec` for the settings."""
    return start(SGLangSpec(model_dir, **settings))


def _cores(workers: int) -> str:
    """Return the cores of each worker in SGLang's form, ``"0,1|2,3"``; workers share cores if there are too few."""
    mine = sorted(os.sched_getaffinity(0))
    each = max(1, len(mine) // workers)
    shares = ([mine[(worker * each + i) % len(mine)] for i in range(each)] for worker in range(workers))
    return "|".join(",".join(map(str, share)) for share in shares)
