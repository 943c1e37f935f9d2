"""How the tests of the default tier are shared between its two processes: by file, the longest files first."""

from __future__ import annotations

from pathlib import Path

import pytest

SHORT = frozenset(
    {
        "rl/test_links.py",
        "control/test_discovery.py",
        "control/test_http.py",
        "control/test_logprobs.py",
        "control/test_router.py",
        "control/test_sglang_client.py",
        "control/test_vllm_client.py",
        "sync/test_rlvllm.py",
        "data/transports/test_collective.py",
        "data/transports/test_delta_broadcast.py",
        "data/transports/test_ipc.py",
        "data/transports/test_native.py",
    }
)
"""Files in which something has to come within two seconds, so that none of them runs beside another one."""

RAY = frozenset({"rl/test_ray_collector.py", "sync/test_ray.py", "test_pages.py"})
"""Files that start a cluster of Ray, of which a machine has one at a time."""

LONGEST = (
    "cli/test_demo.py",
    "short deadlines",
    "bench/test_bench.py",
    "sync/test_turns.py",
    "Ray",
    "data/sharded/test_sharded.py",
    "sync/test_lost_engines.py",
    "engines/test_colocated.py",
    "engines/embedded/test_server.py",
    "rl/test_scheme.py",
    "data/group/test_carriers.py",
    "data/transports/test_contract.py",
    "engines/embedded/test_process.py",
    "rl/test_hydra.py",
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
