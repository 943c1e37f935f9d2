"""Other processes for tests: real ones, with deadlines, that never outlive their test."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
WAIT_S = 120

COMMAND = "import sys; from torchrl_ext.cli.main import main; sys.exit(main())"
"""The command line, as code: its arguments follow."""


def calling(function, *args):
    """Code that calls a function of a module with arguments whose `repr` is a literal."""
    return f"from {function.__module__} import {function.__qualname__} as run; run(*{args!r})"


def python(code, *args, **how):
    """As `finished`; returns what it printed, and fails with what it complained about."""
    done = finished(code, *args, **how)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout


def finished(code, *args, timeout_s=WAIT_S, **how):
    """Run ``code`` in a process of its own, and wait for its end; ``how`` as for `running_python`."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with running_python(code, *args, stdin=subprocess.DEVNULL, stdout=out, stderr=err, **how) as child:
            status = child.wait(timeout_s)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess([code, *args], status, out.read(), err.read())


@contextmanager
def running_python(code, *args, prefix=(), fresh=False, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None):
    """A process that runs ``code`` beside the block; killed at its end.

    With ``fresh``, or a ``prefix`` (a command to run it by), it is an interpreter that has imported nothing yet.
    """
    streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
    if prefix or fresh:
        command = [*prefix, sys.executable, "-c", code, *map(str, args)]
        child = subprocess.Popen(command, cwd=ROOT, text=True, **streams)
    else:
        child = Forked(code, args, **streams)
    try:
        yield child
    finally:
        child.kill()
        child.wait(WAIT_S)
        for stream in (child.stdin, child.stdout, child.stderr):
            if stream is not None:
                with suppress(BrokenPipeError):  # what was written, and never read
                    stream.close()


class Forked:
    """As `subprocess.Popen`, for a child that `tests.forking` makes, which has imported the packages."""

    _asking = threading.Lock()

    def __init__(self, code, args, *, stdin, stdout, stderr):
        self.returncode = None
        self._told = b""
        asked = {"code": code, "args": [str(arg) for arg in args], "environ": dict(os.environ)}
        request = json.dumps(asked).encode()
        with ExitStack() as given:
            self.stdin, first = _ends(given, stdin, 0)
            self.stdout, second = _ends(given, stdout, 1)
            self.stderr, third = _ends(given, stderr, 2)
            self._status, told = os.pipe()
            given.callback(os.close, told)
            with self._asking:
                socket.send_fds(forking(), [request], [first, second, third, told])
        self.pid = int(self._next(WAIT_S))

    def poll(self):
        """The exit status, negative for a signal; None while it runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.returncode = int(self._next(WAIT_S))
            os.close(self._status)
        return self.returncode

    def wait(self, timeout=WAIT_S):
        """`poll` at its end, for which it has ``timeout`` seconds."""
        if self.returncode is None and not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(["forked", str(self.pid)], timeout)
        return self.poll()

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        with suppress(ProcessLookupError):
            self.send_signal(signal.SIGKILL)

    def _next(self, timeout):
        until = time.monotonic() + timeout
        while b" " not in self._told:
            assert select.select([self._status], [], [], max(0.0, until - time.monotonic()))[0], "no answer"
            read = os.read(self._status, 64)
            assert read, "the process that forks is gone"
            self._told += read
        word, _, self._told = self._told.partition(b" ")
        return word


def _ends(given, stream, number):
    """Our end of a child's stream, or None, and the descriptor for the child; ``given`` closes what we keep no longer.

    A stream is said as for `subprocess.Popen`.
    """
    if stream is None:
        return None, number
    if stream is subprocess.PIPE:
        read, write = os.pipe()
        ours, theirs, mode = (write, read, "w") if number == 0 else (read, write, "r")
        given.callback(os.close, theirs)
        return open(ours, mode), theirs
    if stream is subprocess.DEVNULL:
        null = os.open(os.devnull, os.O_RDWR)
        given.callback(os.close, null)
        return None, null
    return None, stream.fileno()


@functools.cache
def forking():
    """The socket to a `tests.forking` of this session, which ends with it."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.forking", str(other.fileno())],
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def end():
        own.close()
        server.wait(WAIT_S)

    atexit.register(end)
    return own


def family(pid):
    """A process and everything that it started."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def maps_of(pid):
    """What a process has mapped; nothing when it ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/maps").read_text()
    return ""


def files_of(pid):
    """What a process holds open; what it closes meanwhile is passed over."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found.append(os.readlink(path))
    return found
