"""How the tests of the default tier are shared between its two processes: by file, the longest files first."""

from __future__ import annotations

GROUPS = {
    # in which something has to come within two seconds, so that none of them runs beside another one
    "short deadlines": {
        *(f"data/transports/test_{name}.py" for name in ("collective", "delta_broadcast", "ipc", "native")),
        *(f"control/test_{name}.py" for name in ("clients", "discovery", "http", "router")),
        "rl/test_links.py", "sync/test_rlvllm.py",
    },
    # which start a cluster of Ray, of which a machine has one at a time
    "Ray": {"rl/test_ray_collector.py", "sync/test_ray.py", "test_pages.py"},
}  # fmt: skip
LONGEST = (
    "Ray",
    "cli/test_demo.py",
    "short deadlines",
    "lag/test_transports.py",
    "testing/test_engine_kit.py",
    "control/test_engine_contract.py",
    "rl/test_hydra.py",
    "data/transports/test_delta_owners.py",
    "sync/test_turns.py",
    "test_third_party.py",
    "control/test_engine_states.py",
    "lag/test_sleep.py",
    "sync/test_lost_engines.py",
)
"""Files, and groups of files, that begin first, so that neither process waits long for the other at the end."""


def group_of(nodeid):
    """The file of a test, whose tests share fixtures, or the group that its file is in."""
    name = nodeid.partition("::")[0].removeprefix("tests/")
    return next((group for group, files in GROUPS.items() if name in files), name)


def longest_first(items):
    """Sort tests by `LONGEST`."""
    first = {group: place for place, group in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(group_of(item.nodeid), len(first)))


def scheduler(config, log):
    """What gives each process one group after the other (marks of groups get lost between xdist 3.8 and pytest 9.2)."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        _split_scope = staticmethod(group_of)

    return ByGroup(config, log)
