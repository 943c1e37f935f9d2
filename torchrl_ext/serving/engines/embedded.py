"""`EmbeddedServer` starts the embedded engine as a child process that ends with its parent."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torchrl_ext.serving.server import EngineSpec, Server, as_flags
from torchrl_ext.types import API_KEY_VARIABLE

__all__ = ["EmbeddedServer", "EmbeddedSpec"]


@dataclass(frozen=True, kw_only=True)
class EmbeddedSpec(EngineSpec):
    """The settings and the command line of the embedded engine; see `ServerSpec` and `EngineSpec` for the common ones.

    Attributes:
        device: torch device of the model.
        threads: threads of one operator; None leaves torch's default.
    """

    name: ClassVar[str] = "embedded"
    key_variable: ClassVar[str | None] = API_KEY_VARIABLE

    device: str = "cpu"
    threads: int | None = None
    start_timeout_s: float = 120.0

    @classmethod
    def role(cls, worker_type: str, encoders: Sequence[str], bootstrap_port: Callable[[], int]) -> dict[str, Any]:
        return {}

    def interpreter(self) -> Path:
        return Path(sys.executable)

    def command(self, python: Path, port: int) -> list[str]:
        arguments = {
            "model": self.model,
            "port": port,
            "dtype": self.dtype,
            "device": self.device,
            "max-model-len": self.max_model_len,
            "threads": self.threads,
        }
        return [str(python), "-m", "torchrl_ext.embedded", *as_flags(arguments)]

    def variables(self, python: Path, command: Sequence[str]) -> dict[str, str]:
        return {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class EmbeddedServer(Server):
    """Starts an embedded engine and waits until it is healthy; takes the fields of `EmbeddedSpec` as arguments."""

    spec = EmbeddedSpec
