"""Specifications of servers: settings, command line, environment variables; `start` runs one."""

from __future__ import annotations

import importlib.util
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import torch

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.control.serving.processes import GuardedProcess, reachable, usable_port

__all__ = ["CPU_PLUGIN", "EngineSpec", "ServerSpec", "StockSpec", "as_flags", "start"]

CPU_PLUGIN = "torchrl_ext_cpu"
"""The plugin that environments of `torchrl_ext.cli.environments` have; engines pass over one that they lack."""


@dataclass(frozen=True, kw_only=True)
class ServerSpec(ABC):
    """The settings of one kind of server, and the command line and environment variables made from them.

    Attributes:
        name: used in messages.
        module: import name of the server's program.
        installed: how to get the server, the hint of the error if it is missing.
        health: route that answers 200 when the server is ready.
        shared_memory: see `GuardedProcess`.
        host: address to listen on; a setting only of kinds that redeclare it.
        plugin: whether our package is put on the server's path; a setting only of kinds that redeclare it.
        port: 0 picks a free port.
        environ: variables such as ``CUDA_VISIBLE_DEVICES``; they override `variables` and this process's own.
        log_path: see `GuardedProcess`.
        python: interpreter of an environment with the server; None uses this process's own.
        start_timeout_s: deadline of the start, in seconds.
        cancel: another thread sets it to cancel the start.
    """

    name: ClassVar[str]
    module: ClassVar[str]
    installed: ClassVar[str] = "name an interpreter that has it: python=..."
    health: ClassVar[str] = "/health"
    shared_memory: ClassVar[tuple[str, ...]] = ()

    host: str = field(default="127.0.0.1", init=False)
    plugin: bool = field(default=False, init=False)
    port: int = 0
    environ: Mapping[str, str] = field(default_factory=dict)
    log_path: str | Path | None = None
    python: str | Path | None = None
    start_timeout_s: float = 300.0
    cancel: threading.Event | None = None

    @classmethod
    def settings(cls) -> tuple[str, ...]:
        """Return the names of the fields that can be set."""
        return tuple(one.name for one in fields(cls) if one.init)

    @property
    def interpreter(self) -> Path:
        """The Python interpreter that runs the server."""
        return Path(self.python or sys.executable)

    def check(self) -> None:
        """Check the settings before the start.

        Raises:
            ConfigError: the settings cannot work, or this environment lacks the server.
        """
        package = self.module.partition(".")[0]
        if self.python is None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"this environment has no {package}", state=f"no {self.name} was started", hint=self.installed
            )

    @abstractmethod
    def command(self, port: int) -> list[str]:
        """Return the program and its arguments."""

    def private(self) -> dict[str, str]:
        """Return the arguments that nobody else on the machine may read, for `GuardedProcess`."""
        return {}

    def variables(self) -> dict[str, str]:
        """Return the environment variables that the server needs, except ``PYTHONPATH`` for our plugin."""
        return {}


@dataclass(frozen=True, kw_only=True)
class EngineSpec(ServerSpec):
    """The settings that every engine has, for one model.

    Attributes:
        probe: route that a router checks if the engine has no key; it answers 200 while the engine is paused.
        key_variable: environment variable that sets the engine's key; None if the key is an argument.
        negates: whether ``--no-x`` makes the setting ``x`` false.
        model_dir: Hugging Face checkpoint directory.
        dtype: ``"auto"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        max_model_len: maximum tokens of a sequence, prompt included; None uses the model's limit.
    """

    probe: ClassVar[str] = "/health"
    key_variable: ClassVar[str | None] = None
    negates: ClassVar[bool] = False

    model_dir: str | Path = field(kw_only=False)
    dtype: str = "auto"
    max_model_len: int | None = None

    @classmethod
    @abstractmethod
    def role(cls, worker_type: str) -> dict[str, Any]:
        """Return the settings for a worker type (pools on GPUs over NIXL are untested).

        Args:
            worker_type: ``"regular"``, ``"prefill"`` or ``"decode"``.
        """

    def check(self) -> None:
        if not self.model.is_dir():
            raise ConfigError(f"{self.model_dir} is not a directory", expected="a Hugging Face checkpoint directory")
        super().check()

    @property
    def model(self) -> Path:
        """The absolute path of the checkpoint."""
        return Path(self.model_dir).absolute()


@dataclass(frozen=True, kw_only=True)
class StockSpec(EngineSpec):
    """The settings that vLLM and SGLang servers share.

    Attributes:
        cpu: whether the server computes on the CPU; None does so if this process sees no GPU.
        tensor_parallel_size: workers that share the model.
        plugin: whether the server gets our plugin.
        sleep_mode: let the server release device memory; no effect on a CPU.
        extra_args: more arguments for the server.
    """

    host: str = "127.0.0.1"
    cpu: bool | None = None
    tensor_parallel_size: int = 1
    plugin: bool = True
    sleep_mode: bool = False
    extra_args: Sequence[str] = ()

    @property
    def on_cpu(self) -> bool:
        """Whether the server computes on the CPU."""
        return not torch.cuda.is_available() if self.cpu is None else self.cpu

    def allow_list(self, others: Iterable[str]) -> str:
        """Return an allow-list of plugins: ``others``, ours, and that of our CPU environments if this is a CPU."""
        ours = ("torchrl_ext", CPU_PLUGIN) if self.on_cpu else ("torchrl_ext",)
        return ",".join(dict.fromkeys([*filter(None, map(str.strip, others)), *ours]))


def start(spec: ServerSpec) -> GuardedProcess:
    """Start a server as a child process and wait until it is healthy.

    Raises:
        ConfigError: the settings cannot work, the port is taken, or a package is missing.
        EngineError: the server ended while starting, or the start was cancelled; the message has the end of its log.
        DeadlineError: the server was not healthy in time and was ended.
    """
    spec.check()
    port = usable_port(spec.port, spec.host)
    return GuardedProcess(
        spec.command(port),
        name=spec.name,
        url=f"http://{reachable(spec.host)}:{port}",
        environ={**spec.variables(), **spec.environ},
        health=spec.health,
        log_path=spec.log_path,
        start_timeout_s=spec.start_timeout_s,
        cancel=spec.cancel,
        shared_memory=spec.shared_memory,
        plugin=spec.plugin,
        private=spec.private(),
    )


def as_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return ``--name=value`` for each argument that is not None."""
    return [f"--{name}={value}" for name, value in arguments.items() if value is not None]
