"""Run servers as child processes: keep a log, wait for health up to a deadline, and end every descendant.

An overlay puts our plugin on a server's ``PYTHONPATH``, so that its environment is not changed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
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
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torchrl_ext
from torchrl_ext.base.deadline import Deadline, in_thread
from torchrl_ext.base.errors import ConfigError, DeadlineError, EngineError, WeightSyncError
from torchrl_ext.control.http import HTTPSession
from torchrl_ext.control.serving.guard import descendants

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "GuardedProcess",
    "ServerSpec",
    "free_port",
    "make_overlay",
    "on_path",
    "reachable",
    "stop_all",
    "usable_port",
    "wait_until_healthy",
]

log = logging.getLogger("torchrl_ext")

_GUARD = Path(__file__).with_name("guard.py")
_POLL_S, _ANSWER_S = 0.1, 5.0
_GRACE_S = 15.0
_PORTS, _PORT_TRIES = range(16384, 32768), 64  # below the range of which Linux itself gives ports, ip(7)
_LOG_CHARS, _LOG_BYTES = 4000, 64 << 20
_ERRORS = 3
_ERROR = re.compile(rb"[A-Z]\w*(?:Error|Exception): .+")


@dataclass(frozen=True, kw_only=True)
class ServerSpec(ABC):
    """The settings that every kind of server has.

    Attributes:
        name: used in messages.
        module: import name of the server's program.
        installed: how to get the server, the hint of the error if it is missing.
        health: route that answers 200 when the server is ready.
        host: address to listen on.
        port: 0 picks a free port.
        environ: variables such as ``CUDA_VISIBLE_DEVICES``; they override `variables` and this process's own.
        log_path: file to which the output is appended; None uses a temporary file that `GuardedProcess.stop` removes.
        python: interpreter of an environment with the server; None uses this process's own.
        plugin: whether our package is put on the server's path.
        start_timeout_s: deadline of the start, until the server is healthy, in seconds.
        extra_args: more arguments for the server.
    """

    name: ClassVar[str]
    module: ClassVar[str]
    installed: ClassVar[str] = "name an interpreter that has it: python=..."
    health: ClassVar[str] = "/health"

    host: str = "127.0.0.1"
    port: int = 0
    environ: Mapping[str, str] = field(default_factory=dict)
    log_path: str | Path | None = None
    python: str | Path | None = None
    plugin: bool = False
    start_timeout_s: float = 300.0
    extra_args: Sequence[str] = ()

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
        """Return the arguments that go into a YAML file of this user alone, which the program gets as ``--config``.

        Everybody on the machine can read a command line.
        """
        return {}

    def variables(self) -> dict[str, str]:
        """Return the environment variables that the server needs, except ``PYTHONPATH`` for our plugin."""
        return {}


class GuardedProcess:
    """Runs a server that ends with this process; a context manager.

    The program runs under `torchrl_ext.control.serving.guard` in its own session: Ctrl-C in a terminal reaches only
    this process, and the program ends however this process dies.

    Args:
        spec: what to start.

    Attributes:
        name: used in messages.
        url: base address of the server.
        pid: the program's process id.
        log_path: file with the output.

    Raises:
        ConfigError: the settings cannot work, the port is taken, or a package is missing.
        EngineError, DeadlineError: the program could not be started, or not in time.
    """

    def __init__(self, spec: ServerSpec) -> None:
        spec.check()
        port = usable_port(spec.port, spec.host)
        self.name, self._health = spec.name, spec.health
        self.url, command, private = f"http://{reachable(spec.host)}:{port}", spec.command(port), spec.private()
        self._within, self._http = Deadline(spec.start_timeout_s), HTTPSession(self.url, timeout_s=_ANSWER_S)
        self._folder = Path(tempfile.mkdtemp(prefix=f"torchrl-ext-{self.name}-"))
        self.log_path, self._kept = Path(spec.log_path or self._folder / "log"), spec.log_path is not None
        variables = {**os.environ, **spec.variables(), **spec.environ}
        try:
            if spec.plugin:
                variables["PYTHONPATH"] = on_path(make_overlay(self._folder / "overlay"), variables.get("PYTHONPATH"))
            if private:
                file = self._folder / "config.yaml"
                file.touch(mode=0o600)
                file.write_text(json.dumps(private))  # JSON is YAML
                command += ["--config", str(file)]
            with self.log_path.open("ab") as log:
                self._began = log.tell()  # an earlier run may have used the same file
                self._guard = subprocess.Popen(
                    [sys.executable, "-I", str(_GUARD), str(_GRACE_S), str(os.getpid()), *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                    env=variables,
                )
        except BaseException:
            shutil.rmtree(self._folder)
            raise
        try:
            self.pid = self._first_word(spec.start_timeout_s)
        except BaseException:
            self.stop()
            raise

    def alive(self) -> bool:
        """Return whether the program runs."""
        return self._guard.poll() is None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait at most ``timeout_s`` seconds for the program to end; return whether it did."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(timeout_s)
        return not self.alive()

    def healthy(self) -> bool:
        """Ask whether the server is ready.

        Raises:
            EngineError: the program has ended; with its errors and the end of its log.
            DeadlineError: the deadline of its start is over; with the end of its log.
        """
        where = f"the whole log is {self.log_path}" if self._kept else "log_path= keeps the whole log"
        if not self.alive():
            raise EngineError(
                f"{self.name} ended while starting; errors that it printed: {self.errors() or 'none'}; "
                f"its log ends with: {self.log() or 'nothing'}",
                hint=where,
            )
        with contextlib.suppress(WeightSyncError):
            if self._http.call("GET", self._health).status == 200:
                return True
        if self._within.over:
            late = f"{self.name} at {self.url} was not healthy within {self._within.timeout_s:g} s"
            raise DeadlineError(f"{late}; its log ends with: {self.log()}", hint=where)
        return False

    def log(self) -> str:
        """Return the last 4,000 characters of the output; empty once a temporary log was removed."""
        return self._output()[-_LOG_CHARS:].decode(errors="replace").strip()

    def errors(self) -> str:
        """Return the last three distinct exceptions in the output: the end of a log often shows only a consequence."""
        found = [line[:_LOG_CHARS].decode(errors="replace").strip() for line in _ERROR.findall(self._output())]
        return "; ".join(list(dict.fromkeys(found))[-_ERRORS:])

    def stop(self) -> None:
        """End the program and everything that it started, and wait. May be called twice."""
        self._end(self._guard)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def _output(self) -> bytes:
        """Return this run's output, at most its last 64 MiB."""
        with contextlib.suppress(FileNotFoundError), self.log_path.open("rb") as log:
            log.seek(max(self._began, log.seek(0, os.SEEK_END) - _LOG_BYTES))
            return log.read()
        return b""

    def _first_word(self, timeout_s: float) -> int:
        said = self._guard.stdout
        if said is None or not select.select([said], [], [], timeout_s)[0]:
            raise DeadlineError(f"{self.name} could not be started within {timeout_s:g} s", state="it was ended")
        first = said.readline().strip()
        if not first.isdigit():
            raise EngineError(f"{self.name} could not be started: {self.log()}")
        return int(first)

    def _end(self, guard: subprocess.Popen[bytes]) -> None:
        """Make the guard end the program; kill both if it does not."""
        if guard.stdin is not None and not guard.stdin.closed:
            with contextlib.suppress(OSError):  # a byte: forked children of ours may keep the pipe open
                os.write(guard.stdin.fileno(), b"\n")
            guard.stdin.close()
            if not self.alive() and guard.returncode < 0:  # killed before it could end its program
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(guard.pid, signal.SIGKILL)
        if not self.wait(2 * _GRACE_S):
            for pid in [*descendants(guard.pid), guard.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not self.wait(_GRACE_S):
                log.error("%s (under process %d) did not end although it was killed", self.name, guard.pid)
        if guard.stdout is not None:
            guard.stdout.close()


def wait_until_healthy(servers: Iterable[GuardedProcess]) -> None:
    """Wait until every server is healthy; raises as `GuardedProcess.healthy` does for the first one that fails."""
    waiting = list(servers)
    while waiting := [server for server in waiting if not server.healthy()]:
        time.sleep(_POLL_S)


def stop_all(servers: Iterable[GuardedProcess]) -> None:
    """End servers at the same time, and wait."""
    for end in [in_thread(server.stop, f"stop {server.name}") for server in servers]:
        end.result()


def free_port() -> int:
    """Return a free port of 127.0.0.1, one that the system gives to nobody before the server listens on it.

    Raises:
        EngineError: no port is free.
    """
    for port in [*random.SystemRandom().sample(_PORTS, _PORT_TRIES), 0]:
        with contextlib.suppress(OSError):
            return _bound(port, "127.0.0.1")
    raise EngineError("there is no free port on 127.0.0.1")


def usable_port(port: int, host: str = "127.0.0.1") -> int:
    """Return ``port``, or a free port for 0.

    Raises:
        ConfigError: the port is taken; the process there would answer the engine's health check.
    """
    try:
        return _bound(port, host) if port else free_port()
    except OSError as error:
        raise ConfigError(
            f"port {port} cannot be used: {error}", hint="choose another port, or 0 for any free one"
        ) from None


def _bound(port: int, host: str) -> int:
    """Bind a port for a moment (0: any free port) and return it."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # a process that another thread forks keeps a copy of the probe until it execs; without SO_REUSEADDR that copy
        # would block the server for which the port was chosen
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])


def reachable(host: str) -> str:
    """Return the host, for a URL, at which a local client reaches a server that listens on ``host``."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


_PLUGINS = {
    "vllm.general_plugins": "vllm.register:register",
    "vllm.endpoint_plugins": "vllm.endpoint:UpdateFromDisk",
    "sglang.srt.plugins": "sglang.register:register",
}
_PACKAGE = Path(torchrl_ext.__file__).resolve().parent


def make_overlay(folder: Path) -> Path:
    """Fill ``folder`` so that an interpreter with it on ``PYTHONPATH`` finds our package and its entry points.

    The layout follows https://packaging.python.org, "Recording installed projects".
    """
    folder.mkdir(exist_ok=True)
    (folder / _PACKAGE.name).symlink_to(_PACKAGE, target_is_directory=True)
    name = "torchrl_ext_overlay"  # not the package's own: Python sees only the first of two distributions with one name
    info = folder / f"{name}-{torchrl_ext.__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {torchrl_ext.__version__}\n")
    groups = (f"[{group}]\ntorchrl_ext = torchrl_ext.engines.{target}\n" for group, target in _PLUGINS.items())
    (info / "entry_points.txt").write_text("".join(groups))
    return folder


def on_path(overlay: Path, path: str | None = None) -> str:
    """Return ``path`` (None uses this process's ``PYTHONPATH``) with ``overlay`` in front."""
    path = os.environ.get("PYTHONPATH") if path is None else path
    return os.pathsep.join([str(overlay), *filter(None, (path or "").split(os.pathsep))])
