"""Run child processes, servers as a rule: a log, a health check with a deadline, an end that leaves nothing behind."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import DeadlineError, EngineError, WeightSyncError
from torchrl_ext.rpc.http import HTTPSession
from torchrl_ext.serving.guard import descendants

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["GuardedProcess", "ServerProcess", "free_port", "reachable"]

log = logging.getLogger("torchrl_ext")

_GUARD = Path(__file__).with_name("guard.py")
_POLL_S, _ANSWER_S = 0.1, 5.0
_GRACE_S = 15.0
_LOWEST_PORT, _PORT_TRIES = 16384, 64
_LOG_CHARS = 4000
_ERRORS = 3
_ERROR_LINE = re.compile(rb"[A-Z]\w*(?:Error|Exception): .+")


class GuardedProcess:
    """Runs a program that ends with this process; a context manager.

    It runs under `torchrl_ext.serving.guard`, in a session of its own: Ctrl-C in a terminal reaches only this process,
    and the program ends with this process however that dies.

    Args:
        command: program and arguments.
        name: for messages.
        environ: variables on top of this process's own.
        log_path: file for what the program prints; None takes a temporary one.
        start_timeout_s: until when it has to run, in seconds.
        shared_memory: first letters of the names of files in /dev/shm that its processes make, and may leave behind:
            those that they have mapped when they are ended are removed.
        folder: one that is for the program alone, and is removed when it has ended.

    Attributes:
        pid: of the program.
        log_path: file with what it prints.

    Raises:
        EngineError: it could not be started; the message has the end of its log.
        DeadlineError: it was not started in time, and was ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        environ: Mapping[str, str] | None = None,
        log_path: str | Path | None = None,
        start_timeout_s: float = 300.0,
        shared_memory: tuple[str, ...] = (),
        folder: Path | None = None,
    ) -> None:
        self.name, self._shared_memory, self._folder = name, shared_memory, folder
        if log_path is None:
            handle, log_path = tempfile.mkstemp(prefix=f"torchrl-ext-{name}-", suffix=".log")
            os.close(handle)
        self.log_path = Path(log_path)
        with self.log_path.open("ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", str(_GUARD), str(_GRACE_S), str(os.getpid()), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **(environ or {})},
            )
        try:
            self.pid = self._first_word(start_timeout_s)
        except BaseException:
            self.stop()
            raise

    def alive(self) -> bool:
        """Return whether it runs."""
        return self._guard.poll() is None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it ends, at most ``timeout_s`` seconds, and return whether it did."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(timeout_s)
        return not self.alive()

    def log(self) -> str:
        """Return what it has printed so far, at most the last 4000 characters."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_CHARS))
            return log.read().decode(errors="replace").strip()

    def errors(self) -> str:
        """Return the last few lines of the log that look like exceptions, as its end often only points at a cause."""
        with self.log_path.open("rb") as log:
            found = [
                match[0].decode(errors="replace")[:_LOG_CHARS].strip()
                for match in map(_ERROR_LINE.search, log)
                if match
            ]
        return "; ".join(list(dict.fromkeys(found))[-_ERRORS:])

    def stop(self) -> None:
        """End it and whatever it started, and wait for it. May be called twice."""
        guard = self._guard
        left = _mapped(guard.pid, self._shared_memory) if self._shared_memory and self.alive() else set()
        if guard.stdin is not None and not guard.stdin.closed:
            with contextlib.suppress(OSError):  # a byte, since forked children of ours may keep the pipe open
                os.write(guard.stdin.fileno(), b"\n")
            guard.stdin.close()
            if not self.alive() and guard.returncode < 0:  # the guard was killed, and could not end its program
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(guard.pid, signal.SIGKILL)
        if not self.wait(2 * _GRACE_S):
            for pid in [*descendants(guard.pid), guard.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not self.wait(_GRACE_S):
                log.error("%s (under process %d) does not end, although it was killed", self.name, guard.pid)
        if guard.stdout is not None:
            guard.stdout.close()
        for path in left:
            path.unlink(missing_ok=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def _first_word(self, timeout_s: float) -> int:
        """Return the program's process id, which its guard prints first."""
        said = self._guard.stdout
        if said is not None and not select.select([said], [], [], timeout_s)[0]:
            raise DeadlineError(f"{self.name} could not be started within {timeout_s:g} s", state="it was ended")
        first = said.readline().strip() if said is not None else b""
        if not first.isdigit():
            raise EngineError(f"{self.name} could not be started: {self.log()}")
        return int(first)


class ServerProcess(GuardedProcess):
    """Starts a server under a guard, and waits until it answers its health route; a context manager.

    Args:
        command: program and arguments.
        name: for messages.
        url: base address.
        health: route that answers 200 when the server is ready.
        start_timeout_s: deadline of the start, in seconds.
        cancel: set by another thread that wants the start given up.
        settings: others of `GuardedProcess`.

    Attributes:
        url: base address.

    Raises:
        EngineError: it ended while starting, or was given up; the message has the end of its log.
        DeadlineError: it was not healthy in time, and was ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        url: str,
        health: str = "/health",
        start_timeout_s: float = 300.0,
        cancel: threading.Event | None = None,
        **settings: Any,
    ) -> None:
        self.url = url
        super().__init__(command, name=name, start_timeout_s=start_timeout_s, **settings)
        try:
            self._wait_until_healthy(health, start_timeout_s, cancel or threading.Event())
        except BaseException:
            self.stop()
            raise

    def _wait_until_healthy(self, route: str, timeout_s: float, cancel: threading.Event) -> None:
        def healthy() -> bool:
            if not self.alive():
                raise EngineError(
                    f"{self.name} ended while starting; errors that it printed: {self.errors() or 'none'}; "
                    f"its log ends with: {self.log() or 'nothing'}",
                    hint=f"the whole log is {self.log_path}",
                )
            with contextlib.suppress(WeightSyncError):
                return server.call("GET", route).status == 200
            return False

        def late() -> EngineError | DeadlineError:
            if cancel.is_set():
                return EngineError(f"the start of {self.name} at {self.url} was given up", state="it was ended")
            return DeadlineError(
                f"{self.name} at {self.url} was not healthy within {timeout_s:g} s; its log ends with: {self.log()}",
                state="it was ended",
                hint=f"the whole log is {self.log_path}",
            )

        server = HTTPSession(self.url, timeout_s=_ANSWER_S)
        Deadline(timeout_s, stop=cancel).poll(healthy, late=late, longest_s=_POLL_S)


def _mapped(pid: int, prefixes: tuple[str, ...]) -> set[Path]:
    """Return files of these prefixes in /dev/shm that a process or a descendant has mapped; none without /proc."""
    found = set()
    for process in (pid, *descendants(pid)):
        with contextlib.suppress(OSError):  # it has ended
            paths = (line.split(maxsplit=5)[5:] for line in Path(f"/proc/{process}/maps").read_text().splitlines())
            found |= {Path(path[0]) for path in paths if path and path[0].startswith("/dev/shm/")}
    return {path for path in found if path.name.startswith(prefixes)}


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on now.

    A server may need a minute until it listens. Meanwhile the system gives ports of its own range to any process that
    wants one, so this port is from below that range where there is room.

    Raises:
        EngineError: there is none.
    """
    lowest = _LOWEST_PORT
    with contextlib.suppress(OSError, ValueError, IndexError):  # ip(7)
        lowest = max(lowest, int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]))
    below = range(_LOWEST_PORT, lowest)
    for port in [*random.SystemRandom().sample(below, min(_PORT_TRIES, len(below))), 0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            # a process that another thread forks holds a copy until it runs its program: without this, its copy of a
            # closed probe would keep the port from the server that it was chosen for
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return probe.getsockname()[1]
    raise EngineError("there is no free port on 127.0.0.1")


def reachable(host: str) -> str:
    """Return the host by which a client on this machine reaches a server that listens on ``host``."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
