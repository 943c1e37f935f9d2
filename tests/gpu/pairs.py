"""What a trainer and a worker of `tests.gpu.ends` do together, and what it showed."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress

from tests.gpu.ends import MEETING, Road
from tests.processes import WAIT_S, running_python
from torchrl_ext.control.serving.processes import free_port

CODE = "import sys; from tests.gpu.ends import main; main(*sys.argv[1:])"
OTHER = {"trainer": "worker", "worker": "trainer"}
_SHOWN = 300  # characters of an error
_SURE_S = 10  # an end that reports a dead peer has this long beyond its own deadline


def variables(role):
    """NCCL refuses two ranks on one GPU unless it takes them for two machines, which then talk over the loopback."""
    return {"NCCL_HOSTID": f"torchrl-ext-{role}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def environment(role):
    """The command that runs another one with `variables`."""
    return ("env", *(f"{name}={value}" for name, value in variables(role).items()))


class End:
    """One end that runs, and what it says."""

    def __init__(self, role, child):
        self.role, self.child, self._said = role, child, b""

    def hear(self, word, within_s=WAIT_S):
        """What it says next, which has to have ``word``; other lines than ours are passed over."""
        until = time.monotonic() + within_s
        while True:
            line = self._line(until)
            if line.startswith(b"{"):
                said = json.loads(line)
                assert word in said, f"the {self.role} says {said} in the place of {word!r}"
                return said

    def go(self):
        """Have the trainer send the next version."""
        with suppress(BrokenPipeError):  # it ended, which is heard next
            self.child.stdin.write("go\n")
            self.child.stdin.flush()

    def _line(self, until):
        stream = self.child.stdout.fileno()
        while b"\n" not in self._said:
            ready = select.select([stream], [], [], max(0.0, until - time.monotonic()))[0]
            assert ready, f"the {self.role} says nothing"
            read = os.read(stream, 1 << 16)
            assert read, f"the {self.role} ended: {_ending(self.child.wait(WAIT_S))}"
            self._said += read
        line, _, self._said = self._said.partition(b"\n")
        return line


def _ending(status):
    return f"exit status {status}" if status >= 0 else signal.Signals(-status).name


@contextmanager
def running(role, roads):
    """One end of these roads."""
    asked = json.dumps([dataclasses.asdict(road) for road in roads])
    with running_python(CODE, role, asked, prefix=environment(role)) as child:
        yield End(role, child)


@contextmanager
def placed(roads):
    """The roads, each with a place where its ends meet."""
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-gpu-") as folder:
        places = (free_port() if road.transport in MEETING else f"{folder}/{at}" for at, road in enumerate(roads))
        yield [dataclasses.replace(road, place=str(place)) for road, place in zip(roads, places, strict=True)]


def travel(roads, within_s=WAIT_S):
    """Go these roads with one pair of processes, and with a fresh one after a road that failed.

    Returns:
        One record for each road; those that failed have ``failed``.
    """
    records = []
    with placed(roads) as rest:
        while rest:
            with ExitStack() as stack:
                trainer, worker = (stack.enter_context(running(role, rest)) for role in OTHER)
                copy_gbps = trainer.hear("up", within_s)["copy_gbps"]
                worker.hear("up", within_s)
                while rest:
                    records.append({"road": named(rest[0])})
                    try:
                        records[-1] |= _gone(rest.pop(0), trainer, worker, copy_gbps, within_s)
                    except AssertionError as error:
                        records[-1]["failed"] = str(error)
                        break
    return records


def named(road):
    """A road in a few words."""
    what = f"{road.mib} MiB" if road.mib else f"{road.small} small"
    return " ".join([road.transport, what, *(["aside"] if road.aside else []), *(["graph"] if road.graph else [])])


def _gone(road, trainer, worker, copy_gbps, within_s):
    for end in (trainer, worker):
        end.hear("met", within_s)
    seconds, compared = [], 0
    for version in range(1, 1 + road.versions):
        trainer.go()
        sent, got = trainer.hear("sent", within_s), worker.hear("got", within_s)
        assert got["got"] == version, f"version {got['got']} in the place of {version}"
        assert not got["wrong"], f"version {version} has other bits in {got['wrong']}"
        assert not got.get("moved"), f"version {version} moved {got['moved']}"
        assert got.get("graph") is not False, f"the graph does not see version {version}"
        seconds.append(sent["seconds"])
        compared += got["compared"]
    gbps = sent["bytes"] / min(seconds) / 1e9
    found = {"seconds": [round(one, 3) for one in seconds], "gbps": round(gbps, 3), "compared": compared}
    found |= {"of_copy": round(gbps / copy_gbps, 4), "graph": got.get("graph")}
    if sent["pinned"] is not None:
        found["pinned_share"] = round(sent["pinned"] / sent["bytes"], 3)
    return {name: value for name, value in found.items() if value is not None}


def outlived(victim, transports, *, mib, timeout_s=20):
    """Kill one end in the middle of a version on each transport; the other one has to report it, to live, and to go on.

    Returns:
        What the survivor said of each.
    """
    survivor, said = OTHER[victim], []
    how = {"mib": mib, "timeout_s": timeout_s}
    fatal = [Road(transport=one, versions=2, dies=victim, **how) for one in transports]
    roads = placed([*fatal, Road(transport=transports[0], versions=1, **how)])
    with roads as (*fatal, last), running(survivor, [*fatal, last]) as alive:
        copy_gbps = alive.hear("up")["copy_gbps"]
        for road in fatal:
            said.append({"road": f"{named(road)}, {victim} killed", **_outlived(road, victim, alive, timeout_s)})
        with running(victim, [last]) as other:
            other.hear("up")
            trainer, worker = (alive, other) if survivor == "trainer" else (other, alive)
            said.append({"road": f"{named(last)}, then", **_gone(last, trainer, worker, copy_gbps, timeout_s)})
    return said


def _outlived(road, victim, alive, timeout_s):
    with running(victim, [road]) as other:
        other.hear("up")
        trainer, worker = (other, alive) if victim == "trainer" else (alive, other)
        for end in (trainer, worker):
            end.hear("met")
        trainer.go()
        trainer.hear("sent", timeout_s)
        assert not worker.hear("got", timeout_s)["wrong"]
        trainer.go()
        assert other.child.wait(timeout_s) == -signal.SIGKILL, f"the {victim} did not die"
        began = time.monotonic()
        error = alive.hear("error", timeout_s + _SURE_S)
        seconds = round(time.monotonic() - began, 2)
        assert error["error"] in ("TransportError", "NotConnectedError"), error
        assert road.transport not in MEETING or f"(pid {other.child.pid}" in error["text"], error
        assert alive.hear("lives", timeout_s)["lives"] == 3
        return {"error": error["error"], "text": error["text"][:_SHOWN], "seconds": seconds}
