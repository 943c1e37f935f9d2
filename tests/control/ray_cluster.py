"""A real Ray cluster of two nodes on this machine, each with a resource of its own name to place actors by."""

from __future__ import annotations

import gc
import shutil
import tempfile
from contextlib import contextmanager

import pytest

START_S = 120
_STORE_BYTES = 100 << 20


@contextmanager
def two_nodes(*, num_gpus=1):
    """The cluster, with this process as its driver; everything is ended afterwards.

    Its ``num_gpus`` are counted, and nothing else.
    """
    ray = pytest.importorskip("ray")
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: sockets have 107 characters
    node = {"num_cpus": 4, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        cluster = cluster_utils.Cluster()
        try:
            settings = {"memory_monitor_refresh_ms": 0}
            cluster.add_node(**node, resources={"trainer": 8}, _system_config=settings)
            cluster.add_node(**node, resources={"rollout": 8}, num_gpus=num_gpus)
            cluster.wait_for_nodes(timeout=START_S)
            ray.init(address=cluster.address, log_to_driver=False)
            yield ray
        finally:
            gc.collect()  # TorchRL's collectors call Ray when they are deleted, which would start a cluster anew
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
