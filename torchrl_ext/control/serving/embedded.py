"""Run the embedded engine as a child process that ends with its parent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.base.types import API_KEY_VARIABLE
from torchrl_ext.control.serving.processes import GuardedProcess
from torchrl_ext.control.serving.server import EngineSpec, as_flags, start

__all__ = ["EmbeddedServer", "EmbeddedSpec"]


@dataclass(frozen=True, kw_only=True)
class EmbeddedSpec(EngineSpec):
    """The settings of the embedded engine, which has one worker, and listens on this machine alone.

    Attributes:
        device: torch device of the model.
        threads: threads per operator; None keeps torch's default.
    """

    name: ClassVar[str] = "embedded"
    module: ClassVar[str] = "torchrl_ext.engines.embedded"

    host: str = field(default="127.0.0.1", init=False)
    plugin: bool = field(default=False, init=False)
    tensor_parallel_size: int = field(default=1, init=False)
    cpu: bool | None = field(default=None, init=False)
    sleep_mode: bool = field(default=False, init=False)
    extra_args: Sequence[str] = field(default=(), init=False)
    device: str = "cpu"
    threads: int | None = None
    start_timeout_s: float = 120.0

    def check(self) -> None:
        super().check()
        for package in ("transformers", "starlette", "uvicorn"):
            if self.python is None and find_spec(package) is None:
                raise ConfigError.missing(package, "embedded")

    def command(self, port: int) -> list[str]:
        arguments = {
            "model": self.model,
            "port": port,
            "dtype": self.dtype,
            "device": self.device,
            "max-model-len": self.max_model_len,
            "threads": self.threads,
        }
        return [str(self.interpreter), "-m", self.module, *as_flags(arguments)]

    def variables(self) -> dict[str, str]:
        key = {} if self.api_key is None else {API_KEY_VARIABLE: self.api_key}
        return {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **key}


def EmbeddedServer(model_dir: str | Path, **settings: Any) -> GuardedProcess:
    """Start an embedded engine and wait until it is healthy; see `start`, and `EmbeddedSpec` for the settings."""
    return start(EmbeddedSpec(model_dir, **settings))
