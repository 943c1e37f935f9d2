"""A stock vLLM server with our plugin in it, as a child process."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import torchrl_ext
from torchrl_ext.errors import ConfigError
from torchrl_ext.launch.environments import to_stderr, vllm_python
from torchrl_ext.launch.processes import ServerProcess, free_port
from torchrl_ext.types import BACKEND

__all__ = ["VLLMServer"]

_PLUGINS = {
    "vllm.general_plugins": "vllm:register",
    "vllm.endpoint_plugins": "vllm_endpoint:UpdateFromDisk",
}
_PACKAGE = Path(torchrl_ext.__file__).resolve().parent


class VLLMServer:
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
        plain_linears: CPU only: keep linear weights as plain tensors, as a GPU does, instead of packing them.
        extra_args: more arguments for the server.
        log_path: file for what the server prints; None takes a temporary one.
        python: interpreter with vLLM; None finds or makes one.
        report: takes a line of progress at a time.
        start_timeout_s: deadline of the start, in seconds; making an environment does not count.

    Raises:
        ConfigError: ``model_dir`` is no directory, or there is no vLLM to be had.
        EngineError: it ended while starting; the message has the end of its log.
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
        plain_linears: bool = False,
        extra_args: Sequence[str] = (),
        log_path: str | Path | None = None,
        python: str | Path | None = None,
        report: Callable[[str], None] = to_stderr,
        start_timeout_s: float = 300.0,
    ) -> None:
        if not Path(model_dir).is_dir():
            raise ConfigError(f"{model_dir} is no directory", expected="a Hugging Face checkpoint directory")
        python = Path(python or vllm_python(report))
        port = port or free_port()
        arguments: dict[str, Any] = {
            "model": Path(model_dir).absolute(),
            "host": host,
            "port": port,
            "dtype": dtype,
            "tensor-parallel-size": tensor_parallel_size,
            "max-model-len": max_model_len,
            "served-model-name": "policy",
            "weight-transfer-config": json.dumps({"backend": BACKEND}),
        }
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
        command += [f"--{name}={value}" for name, value in arguments.items() if value is not None]
        on_cpu = python != Path(sys.executable) or not torch.cuda.is_available()  # what we make is for CPUs
        command += [
            "--enable-scale-out",
            *(["--enforce-eager"] if on_cpu else []),
        ]  # the former: /inference/v1/generate
        self._overlay = Path(tempfile.mkdtemp(prefix="torchrl-ext-overlay-"))
        try:
            make_overlay(self._overlay)
            self._server = ServerProcess(
                [*command, *extra_args],
                name="vllm",
                url=f"http://{_reachable(host)}:{port}",
                environ=_environ(self._overlay, python, on_cpu, plain_linears),
                log_path=log_path,
                start_timeout_s=start_timeout_s,
            )
        except BaseException:
            shutil.rmtree(self._overlay, ignore_errors=True)
            raise
        self.url, self.pid, self.log_path = self._server.url, self._server.pid, self._server.log_path

    def alive(self) -> bool:
        """Whether the server runs."""
        return self._server.alive()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the server ends, at most ``timeout_s`` seconds; returns whether it did."""
        return self._server.wait(timeout_s)

    def log(self) -> str:
        """What the server has printed so far, at most the last 4000 characters."""
        return self._server.log()

    def stop(self) -> None:
        """End the server and its workers, and wait for it. May be called twice."""
        self._server.stop()
        shutil.rmtree(self._overlay, ignore_errors=True)

    def __enter__(self) -> VLLMServer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()


def make_overlay(folder: Path) -> None:
    """Fill ``folder`` so that it makes our package and its entry point known to whoever has it on ``PYTHONPATH``.

    The layout is that of an installed distribution (https://packaging.python.org, "Recording installed projects").
    """
    (folder / _PACKAGE.name).symlink_to(_PACKAGE, target_is_directory=True)
    name = "torchrl_ext_overlay"  # not the package's own: of two distributions with one name Python sees only the first
    info = folder / f"{name}-{torchrl_ext.__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {torchrl_ext.__version__}\n")
    groups = (f"[{group}]\ntorchrl_ext = torchrl_ext.plugins.{target}\n" for group, target in _PLUGINS.items())
    (info / "entry_points.txt").write_text("".join(groups))


def _environ(overlay: Path, python: Path, on_cpu: bool, plain_linears: bool) -> dict[str, str]:
    paths = [str(overlay), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environ = {
        "PYTHONPATH": os.pathsep.join(paths),
        "VLLM_SERVER_DEV_MODE": "1",  # vLLM has its RL routes only then
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    allowed = os.environ.get("VLLM_PLUGINS")  # an allow-list, and vLLM takes routes only from plugins that are on it
    others = _installed_plugins(python) if allowed is None else filter(None, allowed.split(","))
    environ["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*others, "torchrl_ext"]))
    if on_cpu:
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


def _reachable(host: str) -> str:
    """Where a client on this machine finds a server that listens on ``host``."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
