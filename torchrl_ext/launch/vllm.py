"""A stock vLLM server with our plugin in it, as a child process."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_ext.errors import ConfigError
from torchrl_ext.launch.environments import to_stderr, vllm_python
from torchrl_ext.launch.overlay import on_path
from torchrl_ext.launch.processes import Launched
from torchrl_ext.launch.stock import as_flags, checkpoint_folder, on_cpu, start_with_plugin, usable_port
from torchrl_ext.types import BACKEND

__all__ = ["VLLMServer", "vllm_environ"]

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vllm.config.lora.MaxLoRARanks


class VLLMServer(Launched):
    """Starts vLLM's OpenAI server for one model, ready to follow a trainer; a context manager.

    vLLM comes from this environment where it is installed, else from one that is made for it on first use (CPU). Our
    plugin reaches it through a folder on its ``PYTHONPATH``; nothing is written into its environment.

    Args:
        model_dir: Hugging Face checkpoint directory.
        host: address to listen on.
        port: 0 picks a free one.
        dtype: ``"auto"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        tensor_parallel_size: workers that share the model.
        max_model_len: most tokens of a sequence, prompt included; None takes the model's limit.
        lora_rank: greatest rank of the LoRA adapters that it is to serve, rounded up to one that vLLM knows; None for a
            server without LoRA.
        lora_adapters: adapters that requests may use at the same time.
        plain_linears: CPU only: keep linear weights as plain tensors, as a GPU does, instead of packing them.
        sleep_mode: let the server give device memory back (``--enable-sleep-mode``); nothing on a CPU, which has none.
        extra_args: more arguments for the server.
        environ: variables for the server on top of those that it needs, such as ``CUDA_VISIBLE_DEVICES``.
        log_path: file for what the server prints; None takes a temporary one.
        python: interpreter with vLLM; None finds or makes one.
        report: takes a line of progress at a time.
        start_timeout_s: deadline of the start, in seconds; making an environment does not count.
        cancel: set by another thread that wants the start given up.

    Raises:
        ConfigError: ``model_dir`` is no directory, the port is taken, or there is no vLLM to be had.
        EngineError: it ended while starting, or was given up; the message has the end of its log.
        DeadlineError: it was not healthy in time.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        dtype: str = "auto",
        tensor_parallel_size: int = 1,
        max_model_len: int | None = None,
        lora_rank: int | None = None,
        lora_adapters: int = 1,
        plain_linears: bool = False,
        sleep_mode: bool = False,
        extra_args: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        log_path: str | Path | None = None,
        python: str | Path | None = None,
        report: Callable[[str], None] = to_stderr,
        start_timeout_s: float = 300.0,
        cancel: threading.Event | None = None,
    ) -> None:
        model = checkpoint_folder(model_dir)
        port = usable_port(port, host)
        python = Path(python or vllm_python(report))
        cpu = on_cpu(python)
        arguments: dict[str, Any] = {
            "model": model,
            "host": host,
            "port": port,
            "dtype": dtype,
            "tensor-parallel-size": tensor_parallel_size,
            "max-model-len": max_model_len,
            "served-model-name": "policy",
            "weight-transfer-config": json.dumps({"backend": BACKEND}),
        }
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", *as_flags(arguments)]
        command += ["--enable-scale-out"]  # /inference/v1/generate
        command += [*(["--enforce-eager"] if cpu else []), *_lora(lora_rank, lora_adapters)]
        command += [*(["--enable-sleep-mode"] if sleep_mode and not cpu else []), *extra_args]
        process, overlay = start_with_plugin(
            command,
            name="vllm",
            host=host,
            port=port,
            environ=lambda overlay: {
                **vllm_environ(overlay, python, cpu=cpu, plain_linears=plain_linears),
                **(environ or {}),
            },
            log_path=log_path,
            start_timeout_s=start_timeout_s,
            cancel=cancel,
            shared_memory=("vllm_dist_",),
        )
        super().__init__(process, overlay)


def _lora(rank: int | None, adapters: int) -> list[str]:
    """Room for the adapters, and for the older version of each that running requests still have."""
    if rank is None:
        return []
    room = next((known for known in _RANKS if known >= rank), None)
    if room is None or rank < 1 or adapters < 1:
        raise ConfigError(
            f"lora_rank={rank}, lora_adapters={adapters}", expected=f"a rank up to {_RANKS[-1]}, and 1 adapter or more"
        )
    return [
        "--enable-lora",
        f"--max-lora-rank={room}",
        f"--max-loras={2 * adapters}",
        f"--max-cpu-loras={4 * adapters}",
    ]


def vllm_environ(overlay: Path, python: Path, *, cpu: bool, plain_linears: bool = False) -> dict[str, str]:
    """Variables under which vLLM, as a server or in a process of its own, has our plugin and its RL routes.

    Args:
        overlay: filled by `make_overlay`.
        python: the interpreter with vLLM.
        cpu: whether it computes on the CPU.
        plain_linears: as for `VLLMServer`.
    """
    environ = {
        "PYTHONPATH": on_path(overlay),
        "VLLM_SERVER_DEV_MODE": "1",  # vLLM has its RL routes only then
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    allowed = os.environ.get("VLLM_PLUGINS")  # an allow-list, and vLLM takes routes only from plugins that are on it
    others = _installed_plugins(python) if allowed is None else filter(None, allowed.split(","))
    environ["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*others, "torchrl_ext"]))
    if cpu:
        environ["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        environ["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if plain_linears:
        environ["TORCHRL_EXT_PLAIN_LINEARS"] = "1"
    return environ


def _installed_plugins(python: Path) -> list[str]:
    """Names of the plugins that vLLM finds in an environment by itself."""
    here = python == Path(sys.executable)
    folders = None if here else [str(path) for path in python.parent.parent.glob("lib/python3*/site-packages")]
    found = importlib.metadata.distributions(**({} if folders is None else {"path": folders}))
    points = (point for distribution in found for point in distribution.entry_points)
    return sorted({point.name for point in points if point.group.startswith("vllm.") and "endpoint" not in point.group})
