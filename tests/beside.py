"""How the tests of the default tier are shared between its two processes: by file, the longest files first."""

from __future__ import annotations

from pathlib import Path

import pytest

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

RAY = frozenset({"collectors/test_ray_collector.py", "sync/test_ray.py", "test_pages.py"})
"""Files that start a cluster of Ray, of which a machine has one at a time."""

LONGEST = (
    "cli/test_demo.py",
    "short deadlines",
    "bench/test_bench.py",
    "sync/test_turns.py",
    "Ray",
    "transports/test_sharded.py",
    "sync/test_lost_engines.py",
    "plugins/test_colocated.py",
    "embedded/test_server.py",
    "collectors/test_scheme.py",
    "transports/test_carriers.py",
    "transports/test_contract.py",
    "embedded/test_process.py",
    "configs/test_hydra.py",
)
"""Files, and groups of files, that begin first, so that neither process waits long for the other at the end."""


def share(items):
    """Give each test the group of its file, whose tests share fixtures, and sort by `LONGEST`."""
    first = {group: place for place, group in enumerate(LONGEST)}
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item.path)))
    items.sort(key=lambda item: first.get(group_of(item.path), len(first)))


def group_of(path):
    name = path.relative_to(Path(__file__).parent).as_posix()
    return "short deadlines" if name in SHORT else "Ray" if name in RAY else name
