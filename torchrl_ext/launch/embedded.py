"""`EmbeddedServer`: the embedded engine as a child process that ends with its parent."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from torchrl_ext.errors import ConfigError, DeadlineError, EngineError

__all__ = ["EmbeddedServer"]

_POLL_S = 0.05
_STOP_TIMEOUT_S = 10.0


class EmbeddedServer:
    """Starts ``python -m torchrl_ext.plugins.embedded`` and waits until it is healthy; a context manager.

    The child ends when `stop` is called, at the end of the ``with`` block, and when this process dies in any way: its
    standard input is a pipe that closes then. It is in a session of its own, so Ctrl-C in a terminal reaches only this
    process, which decides when the engine ends.

    Args:
        model_dir: Hugging Face checkpoint directory.
        port: 0 picks a free one.
        dtype: ``"auto"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        device: torch device of the model.
        max_model_len: most tokens of a sequence, prompt included; None takes the model's limit.
        threads: threads of one operator; None leaves torch's default.
        python: interpreter, None for this one.
        start_timeout_s: deadline of the start, in seconds.

    Raises:
        ConfigError: ``model_dir`` is no directory.
        EngineError: the process ended while starting; the message has the end of its log.
        DeadlineError: it was not healthy in time.
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
        python: str | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        if not Path(model_dir).is_dir():
            raise ConfigError(f"{model_dir} is no directory", expected="a Hugging Face checkpoint directory")
        port = port or free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [python or sys.executable, "-m", "torchrl_ext.plugins.embedded", "--exit-with-parent"]
        settings = {
            "model": Path(model_dir).absolute(),
            "port": port,
            "dtype": dtype,
            "device": device,
            "max-model-len": max_model_len,
            "threads": threads,
        }
        command += [f"--{name}={value}" for name, value in settings.items() if value is not None]
        self._log = tempfile.TemporaryFile(prefix="torchrl-ext-embedded-")  # noqa: SIM115 - lives as long as the child
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        try:
            self._wait_until_healthy(start_timeout_s)
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether the child runs."""
        return self._process.poll() is None

    def log(self) -> str:
        """What the child has written so far, at most the last 4000 characters."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), 4000, max(0, size - 4000)).decode(errors="replace").strip()

    def stop(self) -> None:
        """End the child and wait for its end. May be called twice."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_TIMEOUT_S)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def _wait_until_healthy(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        pause = threading.Event()
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while time.monotonic() < until:
                if not self.alive():
                    raise EngineError(
                        f"the embedded engine ended with status {self._process.returncode} while starting: {self.log()}"
                    )
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(f"{self.url}/health").status_code == 200:
                        return
                pause.wait(_POLL_S)
        raise DeadlineError(
            f"the embedded engine at {self.url} was not healthy within {timeout_s:g} s",
            state="it was ended",
            hint=f"its log ends with: {self.log() or 'nothing'}",
        )


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
