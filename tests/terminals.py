"""Programs on a terminal of their own."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time

from tests.processes import ROOT, WAIT_S


def on_terminal(code, *args, stream="stderr", **variables):
    """Run ``code`` with one of its streams on a terminal; return the text that it showed there, and of the other one.

    ``variables`` are of its environment.
    """
    here, there = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100", **variables}
    command = [sys.executable, "-c", code, *map(str, args)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: there}
    with subprocess.Popen(command, cwd=ROOT, env=env, text=True, **streams) as child:
        os.close(there)
        shown, ends = b"", time.monotonic() + WAIT_S
        while time.monotonic() < ends:
            try:
                shown += os.read(here, 4096)
            except OSError:  # the child has closed it
                break
        printed = "".join(filter(None, child.communicate(timeout=WAIT_S)))
    os.close(here)
    assert child.returncode == 0, shown.decode() + printed
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()), printed.strip()
