"""How the tests of the default tier are shared between its two processes."""

from __future__ import annotations

from collections import Counter

from xdist.scheduler.loadscope import LoadScopeScheduling

SHORT = frozenset(
    {
        "collectors/test_hub.py",
        "rpc/test_async_http.py",
        "rpc/test_discovery.py",
        "rpc/test_http.py",
        "rpc/test_logprobs.py",
        "rpc/test_router.py",
        "rpc/test_sglang_client.py",
        "rpc/test_sglang_rest.py",
        "rpc/test_vllm_client.py",
        "sync/test_rlvllm.py",
        "transports/test_collective.py",
        "transports/test_collective_meeting.py",
        "transports/test_delta_broadcast.py",
        "transports/test_ipc.py",
        "transports/test_ipc_failures.py",
        "transports/test_native.py",
    }
)
"""Files in which something has to come within two seconds, so that none of them runs beside another one."""

SECONDS = {
    "cli/test_demo.py": 76.0,
}
"""What the longest files take. A number that is wrong costs a little time at the end of a run, and nothing else."""

_SECONDS_PER_TEST = 0.1  # of all other files


class Groups(LoadScopeScheduling):
    """Gives a process one group of tests after the other, the longest first: those of a file, which share fixtures."""

    def _split_scope(self, nodeid):
        path = _path(nodeid)
        return "short deadlines" if path in SHORT else path

    def _assign_work_unit(self, node):
        self.workqueue.move_to_end(max(self.workqueue, key=self._seconds), last=False)
        super()._assign_work_unit(node)

    def _seconds(self, group):
        files = Counter(_path(nodeid) for nodeid in self.workqueue[group])
        return sum(SECONDS.get(path, count * _SECONDS_PER_TEST) for path, count in files.items())


def _path(nodeid):
    return nodeid.partition("::")[0].removeprefix("tests/")
