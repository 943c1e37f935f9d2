"""Start servers from their settings, with our plugin on the path of an engine.

The plugin comes by a folder on the server's ``PYTHONPATH``; nothing is written into its environment.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import torch

import torchrl_ext
from torchrl_ext.errors import ConfigError
from torchrl_ext.rpc.connections import number_from
from torchrl_ext.serving.environments import recipe_of, to_stderr
from torchrl_ext.serving.processes import ServerProcess, free_port, reachable

__all__ = [
    "EngineSpec",
    "Server",
    "ServerSpec",
    "StockSpec",
    "as_flags",
    "make_overlay",
    "on_cpu",
    "on_path",
    "usable_port",
]

_HEALTHY = "SKYRL_WAIT_UNTIL_INFERENCE_SERVER_HEALTHY_TIMEOUT_S"

_PLUGINS = {
    "vllm.general_plugins": "vllm.register:register",
    "vllm.endpoint_plugins": "vllm.endpoint:UpdateFromDisk",
    "sglang.srt.plugins": "sglang.register:register",
}
_PACKAGE = Path(torchrl_ext.__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class ServerSpec(ABC):
    """The settings of one kind of server, and the command line and the environment variables that follow from them.

    Attributes:
        name: what it is called in messages.
        health: route that answers 200 when it is ready.
        probes: routes that tell later whether it is up; one that answers 200 is enough.
        shared_memory: see `ServerProcess`.
        host: the address to listen on, of this machine or all of them; a setting only where a kind makes it one.
        plugin: whether our package is put on its path; a setting only where a kind makes it one.
        port: 0 picks a free one.
        environ: variables for the server on top of those that it needs, such as ``CUDA_VISIBLE_DEVICES``.
        log_path: file for what the server prints; None takes a temporary one.
        python: its interpreter; None finds one, or makes it.
        start_timeout_s: deadline of the start, in seconds; making an environment does not count. Where it is not given,
            ``SKYRL_WAIT_UNTIL_INFERENCE_SERVER_HEALTHY_TIMEOUT_S`` of the environment counts before 300.
        cancel: set by another thread that wants the start given up.
    """

    name: ClassVar[str]
    health: ClassVar[str] = "/health"
    probes: ClassVar[tuple[str, ...]] = ("/health",)
    shared_memory: ClassVar[tuple[str, ...]] = ()

    host: str = field(default="127.0.0.1", init=False)
    plugin: bool = field(default=False, init=False)
    port: int = 0
    environ: Mapping[str, str] = field(default_factory=dict)
    log_path: str | Path | None = None
    python: str | Path | None = None
    start_timeout_s: float = field(default_factory=lambda: float(number_from(_HEALTHY, 300)))
    cancel: threading.Event | None = None

    @abstractmethod
    def check(self) -> None:
        """Refuse, before anything is made, settings that cannot work.

        Raises:
            ConfigError: they cannot work.
        """

    @abstractmethod
    def interpreter(self) -> Path:
        """Return the interpreter for the server where ``python`` names none; this may make an environment for it."""

    @abstractmethod
    def command(self, python: Path, port: int) -> list[str]:
        """Return the program and its arguments."""

    @abstractmethod
    def variables(self, python: Path, command: Sequence[str]) -> dict[str, str]:
        """Return the environment variables that it needs, beside the path to our plugin."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec(ServerSpec):
    """The settings that every engine has, for one model.

    Attributes:
        key_variable: environment variable with the key that it asks for; None where the key is an argument.
        negates: whether ``--no-x`` makes its setting ``x`` false.
        model_dir: Hugging Face checkpoint directory.
        dtype: ``"auto"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        max_model_len: most tokens of a sequence, prompt included; None takes the model's limit.
    """

    key_variable: ClassVar[str | None] = None
    negates: ClassVar[bool] = False

    model_dir: str | Path = field(kw_only=False)
    dtype: str = "auto"
    max_model_len: int | None = None

    @classmethod
    @abstractmethod
    def role(cls, worker_type: str, encoders: Sequence[str], bootstrap_port: Callable[[], int]) -> dict[str, Any]:
        """Return the settings that make it a worker of this type (pools on GPUs, by NIXL, were not tested).

        Args:
            worker_type: ``"regular"``, ``"prefill"``, ``"decode"`` or ``"encoder"``.
            encoders: addresses of the encoders of its model.
            bootstrap_port: gives a prefill engine the port where decode engines meet it.

        Raises:
            ConfigError: it has no such workers.
        """

    def check(self) -> None:
        if not self.model.is_dir():
            raise ConfigError(f"{self.model_dir} is no directory", expected="a Hugging Face checkpoint directory")

    @property
    def model(self) -> Path:
        """The absolute path of the checkpoint."""
        return Path(self.model_dir).absolute()


@dataclass(frozen=True, kw_only=True)
class StockSpec(EngineSpec):
    """The settings that servers of vLLM and SGLang share.

    A server comes from this environment where it is installed, else from one that is made for it on first use (CPU).

    Attributes:
        host: the address to listen on.
        tensor_parallel_size: workers that share the model.
        lora_rank: greatest rank of the LoRA adapters that it is to serve; None for a server without LoRA.
        lora_adapters: adapters that requests may use at the same time.
        plugin: whether the server gets our plugin.
        release: one of `torchrl_ext.serving.environments.RELEASES`, which gets an environment of its own; None takes
            this environment's, else the newest of them.
        sleep_mode: let the server give device memory back; without effect on a CPU, which has none.
        extra_args: more arguments for the server.
        report: takes a line of progress at a time while an environment is made.
    """

    host: str = "127.0.0.1"
    tensor_parallel_size: int = 1
    lora_rank: int | None = None
    lora_adapters: int = 1
    plugin: bool = True
    release: str | None = None
    sleep_mode: bool = False
    extra_args: Sequence[str] = ()
    report: Callable[[str], None] = to_stderr

    def check(self) -> None:
        super().check()
        if self.release is not None:
            recipe_of(self.name, self.release)
            if self.python is not None:
                raise ConfigError(f"python={self.python} and release={self.release!r}", expected="one of the two")

    def interpreter(self) -> Path:
        return recipe_of(self.name, self.release).python(self.report)


class Server(ServerProcess):
    """A server as a child process, started from its spec; a context manager. Subclasses only name the spec.

    Args:
        given, settings: fields of `spec`.

    Raises:
        ConfigError: a setting that is unknown or missing; settings that cannot work, a port that is taken, or an
            environment that cannot be made.
        EngineError: it ended while starting, or was given up; the message has the end of its log.
        DeadlineError: it was not healthy in time, and was ended.
    """

    spec: ClassVar[type[ServerSpec]]

    def __init__(self, *given: Any, **settings: Any) -> None:
        unknown = sorted(settings.keys() - set(self.settings()))
        if unknown:
            raise ConfigError(
                f"a server of kind {self.spec.name!r} has no setting {', '.join(unknown)}",
                expected=f"some of {', '.join(self.settings())}",
            )
        try:
            spec = self.spec(*given, **settings)
        except TypeError as error:  # a setting without a default is missing
            raise ConfigError(f"a server of kind {self.spec.name!r} cannot be started so: {error}") from None
        spec.check()
        port = usable_port(spec.port, spec.host)
        python = Path(spec.python or spec.interpreter())
        command = spec.command(python, port)
        environ, folder = spec.variables(python, command), None
        try:
            if spec.plugin:
                folder = Path(tempfile.mkdtemp(prefix="torchrl-ext-overlay-"))
                make_overlay(folder)
                environ["PYTHONPATH"] = on_path(folder)
            super().__init__(
                command,
                name=spec.name,
                url=f"http://{reachable(spec.host)}:{port}",
                environ={**environ, **spec.environ},
                health=spec.health,
                log_path=spec.log_path,
                start_timeout_s=spec.start_timeout_s,
                cancel=spec.cancel,
                shared_memory=spec.shared_memory,
                folder=folder,
            )
        except BaseException:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    @classmethod
    def settings(cls) -> tuple[str, ...]:
        """Return the names of the settings that it takes."""
        return tuple(one.name for one in fields(cls.spec) if one.init)


def usable_port(port: int, host: str = "127.0.0.1") -> int:
    """Return ``port``, or a free one where it is 0.

    Raises:
        ConfigError: it is taken: the process there would answer the health check in the engine's place.
    """
    if not port:
        return free_port()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"port {port} cannot be used: {error}", hint="pick another one, or 0 for any") from None
    return port


def on_cpu(python: Path) -> bool:
    """Return whether an engine of that interpreter computes on the CPU: environments that we make are for CPUs."""
    return python != Path(sys.executable) or not torch.cuda.is_available()


def as_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return ``--name=value`` of each argument that has a value."""
    return [f"--{name}={value}" for name, value in arguments.items() if value is not None]


def make_overlay(folder: Path) -> None:
    """Fill ``folder`` so that an interpreter with it on ``PYTHONPATH`` finds our package and its entry points.

    The layout is that of an installed distribution (https://packaging.python.org, "Recording installed projects").
    """
    (folder / _PACKAGE.name).symlink_to(_PACKAGE, target_is_directory=True)
    name = "torchrl_ext_overlay"  # not the package's own: of two distributions with one name Python sees only the first
    info = folder / f"{name}-{torchrl_ext.__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {torchrl_ext.__version__}\n")
    groups = (f"[{group}]\ntorchrl_ext = torchrl_ext.plugins.{target}\n" for group, target in _PLUGINS.items())
    (info / "entry_points.txt").write_text("".join(groups))


def on_path(overlay: Path) -> str:
    """Return the ``PYTHONPATH`` of this process with ``overlay`` in front."""
    return os.pathsep.join([str(overlay), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
