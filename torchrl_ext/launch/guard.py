"""``python -I guard.py SECONDS COMMAND...``: run a command that ends when our standard input closes.

The parent holds the other end of that pipe, so the command ends when the parent says so and when the parent dies in any
way. Children of the command end with it: they share our process group, and orphans come back to us where the system
can do that. The first line on standard output is the command's process id; the command itself writes to our standard
error. Standard library only: it has to be up at once, and must not put our path into the command's environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

__all__ = ["main"]

_POLL_S = 0.1
_REAP_TIMEOUT_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>


def main(argv: list[str]) -> int:
    """Run, watch, end. Returns the command's status."""
    grace_s, command = float(argv[0]), argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it goes to the whole group below
    print(child.pid, flush=True)
    while child.poll() is None:
        if select.select([0], [], [], _POLL_S)[0] and not os.read(0, 4096):
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(grace_s)
            break
    _end_group()
    return child.returncode if child.returncode is not None else 1


def _end_group() -> None:
    """Whatever the command left behind: a request first, and what ignores it is killed, ourselves included."""
    os.killpg(0, signal.SIGTERM)
    until = time.monotonic() + _REAP_TIMEOUT_S
    while time.monotonic() < until:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            time.sleep(_POLL_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
