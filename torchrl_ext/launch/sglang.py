"""A stock SGLang server with our plugin in it, as a child process."""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_ext.errors import ConfigError
from torchrl_ext.launch.environments import sglang_python, to_stderr
from torchrl_ext.launch.overlay import on_path
from torchrl_ext.launch.processes import Launched
from torchrl_ext.launch.stock import as_flags, checkpoint_folder, on_cpu, start_with_plugin, usable_port

__all__ = ["SGLangServer"]

# an idle scheduler would keep one of the few cores busy
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


_SIZES = (
    ("--tp-size", "--tensor-parallel-size", "--tp"),
    ("--pp-size", "--pipeline-parallel-size", "--pp"),
    ("--dp-size", "--data-parallel-size", "--dp"),
)


class SGLangServer(Launched):
    """Starts SGLang's server for one model, ready to follow a trainer; a context manager.

    SGLang comes from this environment where it is installed, else from one that is made for it on first use (CPU). Our
    plugin reaches it through a folder on its ``PYTHONPATH``; nothing is written into its environment.

    Args:
        model_dir: Hugging Face checkpoint directory.
        host: address to listen on.
        port: 0 picks a free one.
        dtype: ``"auto"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        tensor_parallel_size: workers that share the model.
        max_model_len: most tokens of a sequence, prompt included; None takes the model's limit.
        lora_rank: greatest rank of the LoRA adapters that it is to serve; None for a server without LoRA.
        lora_adapters: adapters that requests may use at the same time.
        plugin: whether the server gets our plugin; without, it follows by full files only.
        sleep_mode: let the server give device memory back (``--enable-memory-saver``, which needs `torch_memory_saver`
            there, and ``--enable-weights-cpu-backup``); nothing on a CPU, which has none.
        extra_args: more arguments for the server.
        environ: variables for the server on top of those that it needs, such as ``CUDA_VISIBLE_DEVICES``.
        log_path: file for what the server prints; None takes a temporary one.
        python: interpreter with SGLang; None finds or makes one.
        report: takes a line of progress at a time.
        start_timeout_s: deadline of the start, in seconds; making an environment does not count.
        cancel: set by another thread that wants the start given up.

    Raises:
        ConfigError: ``model_dir`` is no directory, the port is taken, or there is no SGLang to be had.
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
        plugin: bool = True,
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
        python = Path(python or sglang_python(report))
        cpu = on_cpu(python)
        arguments: dict[str, Any] = {
            "model-path": model,
            "host": host,
            "port": port,
            "dtype": dtype,
            "tp-size": tensor_parallel_size,
            "context-length": max_model_len,
            **(_CPU_ARGUMENTS if cpu else {}),
        }
        command = [str(python), "-m", "sglang.launch_server", *as_flags(arguments), "--skip-server-warmup"]
        command += [*(_CPU_FLAGS if cpu else ()), *_lora(lora_rank, lora_adapters, cpu)]
        command += [*(_SLEEP_FLAGS if sleep_mode and not cpu else ()), *extra_args]
        workers = _workers(command)
        process, overlay = start_with_plugin(
            command,
            name="sglang",
            host=host,
            port=port,
            plugin=plugin,
            environ=lambda overlay: {**_environ(overlay, workers, cpu), **(environ or {})},
            log_path=log_path,
            start_timeout_s=start_timeout_s,
            cancel=cancel,
            health="/health_generate",  # only now: nobody has paused it yet
            shared_memory=("sgl_shm_", "sglang_loads_"),
        )
        super().__init__(process, overlay)


def _lora(rank: int | None, adapters: int, cpu: bool) -> list[str]:
    """Room for the base, the adapters, and the older version of each that running requests still have."""
    if rank is None:
        return []
    if rank < 1 or adapters < 1:
        raise ConfigError(f"lora_rank={rank}, lora_adapters={adapters}", expected="1 or more of each")
    return [
        "--enable-lora",
        f"--max-lora-rank={rank}",
        "--lora-target-modules=all",
        f"--max-loras-per-batch={1 + 2 * adapters}",
        *(["--lora-backend=torch_native"] if cpu else []),
    ]


def _workers(command: Sequence[str]) -> int:
    """Processes that compute: SGLang wants to be told the cores of each, replicas included."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for names in _SIZES:
        parser.add_argument(*names, type=int, default=1, dest=names[0])
    parser.add_argument("--enable-dp-attention", action="store_true", dest="shared")
    try:
        told = vars(parser.parse_known_args(list(command))[0])
    except argparse.ArgumentError:
        return 1  # SGLang says itself what is wrong
    tensor, pipeline, data = (max(1, told[names[0]]) for names in _SIZES)
    return tensor * pipeline * (1 if told["shared"] else data)  # replicas of attention alone are workers of the tensors


def _environ(overlay: Path, workers: int, cpu: bool) -> dict[str, str]:
    # the folder that we are called from, which may be a checkout of ours, says nothing about the engine
    environ = {"PYTHONPATH": on_path(overlay), "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
    # /health would generate a token, for which it waits in vain while the server is paused for new weights: keepers
    # and routers would take it for lost
    environ["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    allowed = os.environ.get("SGLANG_PLUGINS")  # an allow-list
    if allowed:
        environ["SGLANG_PLUGINS"] = ",".join(dict.fromkeys([*allowed.split(","), "torchrl_ext"]))
    if cpu:
        environ["SGLANG_USE_CPU_ENGINE"] = "1"
        environ["TORCHRL_EXT_UNPINNED"] = "1"  # its LoRA pins memory, which takes a GPU
        environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "2")
        if workers > 1:
            environ["SGLANG_CPU_OMP_THREADS_BIND"] = _cores(workers)
    return environ


def _cores(workers: int) -> str:
    """The cores of each worker, as SGLang wants them: ``"0-1|2-3"``; workers share cores where these are too few."""
    mine = sorted(os.sched_getaffinity(0))
    each = max(1, len(mine) // workers)
    shares = ([mine[(worker * each + i) % len(mine)] for i in range(each)] for worker in range(workers))
    return "|".join(",".join(map(str, share)) for share in shares)
