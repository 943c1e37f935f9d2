"""A process that has imported the packages once, and forks a child for each program that `tests.processes` asks for.

An interpreter needs a second or more to import torch, its fork milliseconds. The child is a process like any other: it
has its own pid, can be killed and frozen, and ends as an interpreter ends. Run as ``python -m tests.forking FD``, where
FD is a SOCK_SEQPACKET socket. A request is the JSON of ``{"code", "args", "environ"}`` with four descriptors: standard
input, output and error, and a pipe that is told the child's pid and, at its end, its exit status.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import types

MODULES = (
    "httpx", "hypothesis", "pytest", "tensordict", "torchrl.collectors.llm", "torchrl_ext.cli.commands.demo",
    "torchrl_ext.cli.training", "torchrl_ext.data.deltas.codec_loops", "torchrl_ext.data.deltas.streams",
    "torchrl_ext.engines.embedded.engine", "torchrl_ext.engines.embedded.server", "torchrl_ext.data.deltas.loops",
    "torchrl_ext.control.requests.client", "torchrl_ext.sync.local.inprocess", "torchrl_ext.sync.sender",
    "torchrl_ext.testing", "torchrl_ext.data.transports.collective", "torchrl_ext.data.transports.delta",
    "torchrl_ext.data.transports.disk", "torchrl_ext.data.transports.ipc", "torchrl_ext.data.weights.checkpoint",
    "transformers.models.qwen3.modeling_qwen3", "uvicorn",
)  # fmt: skip
_REQUEST_BYTES = 1 << 17


def serve(requests: socket.socket) -> dict | None:
    """Fork for each request, until nobody is left to ask; returns what to run in a child, None in the parent."""
    running: dict[int, int] = {}
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    while True:
        ready, _, _ = select.select([requests, ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            _tell_ended(running)
        if requests not in ready:
            continue
        request, descriptors, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 4)
        if not request:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            return None
        *streams, status = descriptors
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for target, stream in enumerate(streams):
                os.dup2(stream, target)
            for one in (ended, wake, status, *streams, *running.values()):
                os.close(one)
            requests.close()
            return json.loads(request)
        os.write(status, b"%d " % pid)
        running[pid] = status
        for stream in streams:
            os.close(stream)


def _tell_ended(running: dict[int, int]) -> None:
    """Write the status of every child that ended since."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with open(running.pop(pid), "w") as pipe:
            pipe.write(f"{os.waitstatus_to_exitcode(status)} ")


def run(code: str, args: list[str], environ: dict[str, str]) -> None:
    """What ``python -c code *args`` does, with these variables."""
    os.environ.clear()
    os.environ.update(environ)
    main = types.ModuleType("__main__")
    main.__spec__ = None
    sys.modules["__main__"] = main
    sys.argv = ["-c", *args]
    exec(compile(code, "<string>", "exec"), vars(main))


if __name__ == "__main__":
    # torch imports triton where it is, which then prints a page at the end of each fork; none of them has a GPU
    sys.modules["triton"] = None
    for name in MODULES:
        importlib.import_module(name)
    import torch

    from torchrl_ext.data.weights.digests import position_digest

    position_digest(torch.zeros(4))  # with the first loop that it compiles or loads, numba imports the rest of itself
    gc.collect()
    gc.freeze()  # no child walks, and so copies, what all of them share
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        run(**asked)
