"""Other processes for tests: real ones, with deadlines, that never outlive their test."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
WAIT_S = 120


def python(code, *args, prefix=()):
    """Run ``code`` in a fresh interpreter; returns what it printed, and fails with what it complained about."""
    done = subprocess.run(
        [*prefix, sys.executable, "-c", code, *map(str, args)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout


@contextmanager
def running_python(code, *args, prefix=()):
    """A fresh interpreter with ``code`` beside the block; killed at its end."""
    child = subprocess.Popen(
        [*prefix, sys.executable, "-c", code, *map(str, args)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=WAIT_S)


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
