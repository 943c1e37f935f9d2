"""Lets a server of vLLM or SGLang fork its children from a helper that imports beside it.

Their processes start one after the other, each a fresh interpreter that imports the whole engine for ten seconds. Here
a helper imports while the server does, and the server's children, and theirs, are forked from it. They stay below the
server in the tree of processes; what they run is the same. The interpreter imports this module before anything else
where its folder is on ``PYTHONPATH``, which `tests.real_engines.served` sees to.
"""

import ctypes
import os
import random
import signal
import socket
import sys

IMPORTS = {
    "vllm.entrypoints.openai.api_server": (
        "vllm.entrypoints.openai.api_server",
        "vllm.v1.engine.core",
        "vllm.v1.executor.multiproc_executor",
        "vllm.v1.worker.cpu_worker",
        "vllm.model_executor.models.qwen3",
    ),
    "sglang.launch_server": (
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.scheduler",
        "sglang.srt.managers.detokenizer_manager",
        "sglang.srt.models.registry",
    ),
}
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def started_as():
    """The module that the interpreter was told to run, or None."""
    given = sys.orig_argv
    return given[given.index("-m") + 1] if "-m" in given[:-1] and "-c" not in given else None


def fork_from_a_helper(modules):
    """From now on, what this process would spawn is forked from one that has imported ``modules``."""
    from multiprocessing import connection, context, forkserver, popen_forkserver, resource_tracker, spawn

    get_preparation_data, prepare = spawn.get_preparation_data, spawn.prepare

    def with_variables(name):  # a spawned child has its parent's, which engines change before they start it
        return {**get_preparation_data(name), "environ": dict(os.environ)}

    def as_if_spawned(data):
        os.environ.clear()
        os.environ.update(data.pop("environ"))
        random.seed()
        prepare(data)

    spawn.get_preparation_data, spawn.prepare = with_variables, as_if_spawned
    context.SpawnProcess._Popen = staticmethod(popen_forkserver.Popen)
    server = forkserver._forkserver
    server.ensure_running = lambda: None  # it runs; a child that has children would start another
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(connection.arbitrary_address("AF_UNIX"))
    listener.listen()
    alive_r, alive_w = os.pipe()
    resource_tracker.ensure_running()
    parent = os.getpid()
    if os.fork() == 0:
        try:
            os.close(alive_w)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            signal.signal(signal.SIGQUIT, lambda *_: os.kill(parent, signal.SIGQUIT))  # SGLang's: a child failed
            forkserver.main(listener.detach(), alive_r, modules)
        finally:
            os._exit(0)
    server._forkserver_address, server._forkserver_alive_fd = listener.getsockname(), alive_w
    listener.close()
    os.close(alive_r)


if started_as() in IMPORTS:
    fork_from_a_helper(IMPORTS[started_as()])
