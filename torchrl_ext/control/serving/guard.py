"""``python -I guard.py SECONDS PARENT COMMAND...``: run a command; end it when its parent asks or dies.

PARENT is a process id. That process holds the other end of the guard's standard input. A byte or the end of the pipe
ends the command. So does a change of the guard's parent process: the pipe does not show the parent's death while its
forked children hold the pipe. The command gets SECONDS to exit after SIGTERM; processes that it leaves behind get a
third of that. Everything that the command started is ended, in any session: on Linux the guard adopts orphans. If the
guard is killed, Linux kills the command. The first line on standard output is the command's process id; the command
writes to the guard's standard error. Only the standard library is imported: the guard has to start at once and must not
put our path into the command's environment.
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

__all__ = ["descendants", "main"]

_POLL_S = 0.1
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>


def main(argv: list[str]) -> int:
    """Run the command until it exits or its parent asks or dies; return its exit status."""
    grace_s, parent, command = float(argv[0]), int(argv[1]), argv[2:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # safe: there is no other thread
    )
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `_end_rest` sends it to our whole group
    print(child.pid, flush=True)
    while child.poll() is None:
        if select.select([0], [], [], _POLL_S)[0] or os.getppid() != parent:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(grace_s)
            break
    _end_rest(grace_s / 3)
    return child.returncode if child.returncode is not None else 1


def descendants(pid: int) -> list[int]:
    """Return the ids of all processes below ``pid``, read from /proc (proc(5)); empty where /proc does not exist."""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # it may have ended
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    children.setdefault(int(parent), []).append(int(name))
    found, rest = [], [pid]
    while rest:
        below = children.get(rest.pop(), [])
        found += below
        rest += below
    return found


def _end_rest(grace_s: float) -> None:
    """End every process that the command left behind: SIGTERM first, SIGKILL after ``grace_s``."""
    os.killpg(0, signal.SIGTERM)
    asked, until = set(), time.monotonic() + grace_s
    while _children():
        late_s = time.monotonic() - until
        if late_s > grace_s:  # there is no /proc: kill the group, ourselves included
            os.killpg(0, signal.SIGKILL)
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                if late_s > 0:
                    os.kill(pid, signal.SIGKILL)
                elif pid not in asked:
                    os.kill(pid, signal.SIGTERM)
            asked.add(pid)
        time.sleep(_POLL_S)


def _children() -> bool:
    """Reap children that have ended; return whether others remain."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
        return True
    return False


def _prctl(option: int, value: int) -> None:
    """Call prctl(2) on Linux; do nothing elsewhere."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
