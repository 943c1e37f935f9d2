"""Servers as child processes: a log, a health check with a deadline, an end that leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from torchrl_ext.errors import DeadlineError, EngineError

__all__ = ["ServerProcess", "free_port"]

_GUARD = Path(__file__).with_name("guard.py")
_POLL_S = 0.1
_GRACE_S = 15.0
_LOG_CHARS = 4000


class ServerProcess:
    """Starts a server, and waits until it answers its health route; a context manager.

    The server runs under `torchrl_ext.launch.guard`, in a session of its own: Ctrl-C in a terminal reaches only this
    process, and the server ends with this process however that dies.

    Args:
        command: program and arguments.
        name: for messages.
        url: base address.
        environ: variables on top of this process's own.
        health: route that answers 200 when the server is ready.
        log_path: file for what the server prints; None takes a temporary one.
        start_timeout_s: deadline of the start, in seconds.

    Raises:
        EngineError: it ended while starting; the message has the end of its log.
        DeadlineError: it was not healthy in time, and was ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        url: str,
        environ: Mapping[str, str] | None = None,
        health: str = "/health",
        log_path: str | Path | None = None,
        start_timeout_s: float = 300.0,
    ) -> None:
        self.name, self.url = name, url
        if log_path is None:
            handle, log_path = tempfile.mkstemp(prefix=f"torchrl-ext-{name}-", suffix=".log")
            os.close(handle)
        self.log_path = Path(log_path)
        with self.log_path.open("ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", str(_GUARD), str(_GRACE_S), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **(environ or {})},
            )
        try:
            first = self._guard.stdout.readline().strip() if self._guard.stdout else b""
            if not first.isdigit():
                raise EngineError(f"{name} could not be started: {self.log()}")
            self.pid = int(first)
            self._wait_until_healthy(health, start_timeout_s)
        except BaseException:
            self.stop()
            raise

    def alive(self) -> bool:
        """Whether the server runs."""
        return self._guard.poll() is None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the server ends, at most ``timeout_s`` seconds; returns whether it did."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(timeout_s)
        return not self.alive()

    def log(self) -> str:
        """What the server has printed so far, at most the last 4000 characters."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_CHARS))
            return log.read().decode(errors="replace").strip()

    def stop(self) -> None:
        """End the server and its children, and wait for it. May be called twice."""
        if self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()
        if not self.wait(2 * _GRACE_S):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._guard.pid, signal.SIGKILL)
            self._guard.wait()
        if self._guard.stdout is not None:
            self._guard.stdout.close()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def _wait_until_healthy(self, route: str, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        pause = threading.Event()
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while time.monotonic() < until:
                if not self.alive():
                    raise EngineError(
                        f"{self.name} ended while starting; its log ends with: {self.log() or 'nothing'}",
                        hint=f"the whole log is {self.log_path}",
                    )
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(self.url + route).status_code == 200:
                        return
                pause.wait(_POLL_S)
        raise DeadlineError(
            f"{self.name} at {self.url} was not healthy within {timeout_s:g} s; its log ends with: {self.log()}",
            state="it was ended",
            hint=f"the whole log is {self.log_path}",
        )


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
