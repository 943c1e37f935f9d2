"""`EmbeddedServer`: the embedded engine as a child process that ends with its parent."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from torchrl_ext.launch.processes import Launched, ServerProcess
from torchrl_ext.launch.stock import as_flags, checkpoint_folder, usable_port

__all__ = ["EmbeddedServer"]


class EmbeddedServer(Launched):
    """Starts ``python -m torchrl_ext.embedded`` and waits until it is healthy; a context manager.

    Args:
        model_dir: Hugging Face checkpoint directory.
        port: 0 picks a free one.
        dtype: ``"auto"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        device: torch device of the model.
        max_model_len: most tokens of a sequence, prompt included; None takes the model's limit.
        threads: threads of one operator; None leaves torch's default.
        python: interpreter, None for this one.
        environ: variables for the server, such as ``CUDA_VISIBLE_DEVICES``.
        log_path: file for what the server prints; None takes a temporary one.
        start_timeout_s: deadline of the start, in seconds.
        cancel: set by another thread that wants the start given up.

    Raises:
        ConfigError: ``model_dir`` is no directory, or the port is taken.
        EngineError: the process ended while starting, or was given up; the message has the end of its log.
        DeadlineError: it was not healthy in time, and was ended.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        port: int = 0,
        dtype: str = "auto",
        device: str = "cpu",
        max_model_len: int | None = None,
        threads: int | None = None,
        python: str | Path | None = None,
        environ: Mapping[str, str] | None = None,
        log_path: str | Path | None = None,
        start_timeout_s: float = 120.0,
        cancel: threading.Event | None = None,
    ) -> None:
        model, port = checkpoint_folder(model_dir), usable_port(port)
        arguments = {
            "model": model,
            "port": port,
            "dtype": dtype,
            "device": device,
            "max-model-len": max_model_len,
            "threads": threads,
        }
        server = ServerProcess(
            [str(python or sys.executable), "-m", "torchrl_ext.embedded", *as_flags(arguments)],
            name="embedded",
            url=f"http://127.0.0.1:{port}",
            environ={"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **(environ or {})},
            log_path=log_path,
            start_timeout_s=start_timeout_s,
            cancel=cancel,
        )
        super().__init__(server)
