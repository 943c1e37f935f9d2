"""How the tests of the default tier are shared between its two processes."""

from __future__ import annotations

from collections import Counter

from xdist.scheduler.loadscope import LoadScopeScheduling

SHORT = frozenset(
    {
        "collectors/test_hub.py",
        "rpc/test_discovery.py",
        "rpc/test_http.py",
        "rpc/test_logprobs.py",
        "rpc/test_router.py",
        "rpc/test_sglang_client.py",
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

RAY = frozenset(
    {"collectors/test_ray_collector.py", "serving/test_ray_launcher.py", "sync/test_ray.py", "test_pages.py"}
)
"""Files that start a cluster of Ray, of which a machine has one at a time."""

SECONDS = {
    "cli/test_demo.py": 87,
    "sync/test_turns.py": 45,
    "test_pages.py": 25,
    "transports/test_sharded.py": 24,
    "embedded/test_server.py": 16,
    "sync/test_lost_engines.py": 19,
    "plugins/test_colocated.py": 18,
    "bench/test_sharded.py": 15,
    "collectors/test_scheme.py": 15,
    "transports/test_carriers.py": 13,
    "transports/test_contract.py": 13,
    "embedded/test_process.py": 12,
    "embedded/test_generation.py": 10,
    "configs/test_hydra.py": 12,
    "weights/shards/test_dtensor.py": 11,
    "transports/test_sharded_killed.py": 11,
    "stores/test_object.py": 11,
    "rollout/test_collector.py": 10,
    "codecs/test_encodings.py": 8,
    "sources/megatron/test_source.py": 7,
    "versions/test_warm.py": 7,
    "cli/test_push.py": 7,
    "stores/test_delta_manifest.py": 6,
    "collectors/test_updater.py": 6,
    "transports/test_delta.py": 6,
    "test_examples.py": 6,
    "codecs/test_finding.py": 5,
    "rollout/test_grpo_trainer.py": 5,
    "proof/test_rehearsal.py": 5,
    "serving/test_processes.py": 5,
    "cli/test_serve.py": 5,
    "serving/test_membership.py": 5,
    "test_third_party.py": 5,
    "transports/test_disk.py": 5,
    "rollout/test_policy.py": 5,
    "transports/test_delta_killed.py": 4,
    "bench/test_transport.py": 4,
    "transports/test_ranks.py": 6,
}
"""What the longest files take of a processor. Where one is wrong, a run ends a little later, and that is all."""

_SECONDS_PER_TEST = 0.05  # of all other files


class Groups(LoadScopeScheduling):
    """Gives a process one group of tests after the other, the longest first: those of a file, which share fixtures."""

    def _split_scope(self, nodeid):
        path = _path(nodeid)
        return "short deadlines" if path in SHORT else "Ray" if path in RAY else path

    def _assign_work_unit(self, node):
        self.workqueue.move_to_end(max(self.workqueue, key=self._seconds), last=False)
        super()._assign_work_unit(node)

    def _seconds(self, group):
        files = Counter(_path(nodeid) for nodeid in self.workqueue[group])
        return sum(SECONDS.get(path, count * _SECONDS_PER_TEST) for path, count in files.items())


def _path(nodeid):
    return nodeid.partition("::")[0].removeprefix("tests/")
