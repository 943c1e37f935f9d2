"""Predict the cost of an update by each route: every phase is an amount divided by a speed.

`Facts` gives the speeds of links, stores and devices. `MEASURED` and `ENCODINGS` hold everything else, as
``torchrl-ext bench`` and ``tests.bench`` printed it on two shared x86-64 cores with torch's CPU build.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from torchrl_ext.planning.facts import Facts

__all__ = ["ENCODINGS", "MEASURED", "UNCERTAINTY", "Encoding", "Measured", "Route", "routes"]

_KEYFRAME_EVERY = 25  # the delta transport's default
_LINE_BYTES = 64  # size of a memory line, the unit of reads and writes
_CHANGE_BYTES = 25  # coding one changed element takes as long as comparing this many bytes, in every encoding

UNCERTAINTY = 2.0
"""The phases ``encode``, ``stage`` and ``pause`` take from half to twice the predicted time; others count as exact."""

_UNCERTAIN = ("encode", "stage", "pause")  # mostly work of this library, at speeds measured on another machine


class Measured(NamedTuple):
    """A benchmark's value, its unit (such as ``"bytes/s"``) and the command that measures it."""

    value: float
    unit: str
    command: str


_LANDING, _TRANSPORT = "python -m tests.bench landing", "torchrl-ext bench transport"
MEASURED: Mapping[str, Measured] = MappingProxyType(
    {
        "control": Measured(0.026, "s", f"{_LANDING} --engine vllm"),
        "tensor": Measured(1.2e-4, "s", _TRANSPORT),
        "broadcast": Measured(1.4e9, "bytes/s", _TRANSPORT),
        "publish": Measured(3.8e8, "bytes/s", _TRANSPORT),
        "copy": Measured(5e9, "bytes/s", "torchrl-ext bench delta"),
        "load": Measured(8.4e9, "bytes/s", _LANDING),
        "reload": Measured(1.3e9, "bytes/s", _LANDING),
        "stage": Measured(4.5e9, "bytes/s", _LANDING),
        "commit": Measured(1.4e10, "bytes/s", _LANDING),
    }
)
"""``control``: the calls around a pause. ``tensor``: each further tensor in a broadcast. ``broadcast``: gloo, two
processes. ``publish``: checksum and write files. ``copy``: copy into a staging buffer. ``load``: from memory into
parameters. ``reload``: from files into parameters. ``stage``, ``commit``: decode and write a delta's memory lines."""


class Encoding(NamedTuple):
    """The measured size and effort of one delta encoding.

    Attributes:
        place: bits for the place of a changed element, as a multiple of the minimum (entropy, H(p) / p).
        step: further bits per changed element.
        effort: time to find and code changes, as a multiple of the fastest encoding's.
    """

    place: float
    step: float
    effort: float


ENCODINGS: Mapping[str, Encoding] = MappingProxyType(
    {
        "ulp": Encoding(1.05, 1.7, 1.0),
        "context": Encoding(0.77, 1.05, 1.75),
        "xor": Encoding(2.03, 6.1, 1.5),
        "overwrite": Encoding(0.94, 27.7, 1.7),
        "indices": Encoding(0.0, 48.0, 1.7),  # 32 bits for a place, 16 for a value
        "deltas": Encoding(0.0, 32.0, 1.7),  # 16 bits for the gap to the last place, 16 for a value
    }
)


@dataclass(frozen=True, kw_only=True)
class Route:
    """One route that an update can take, with its predicted phases.

    Attributes:
        transport: name of the transport.
        encoding: the encoding of deltas; None for full updates.
        carrier: ``"disk"`` or ``"collective"`` for deltas, else None.
        bytes: bytes published or sent, counted once for all receivers.
        spans: seconds by phase, in order: ``encode``, ``publish``, ``keyframe``, ``cross`` (between regions),
            ``fetch``, ``send``, ``stage``, ``pause``. Engines generate in all phases except ``pause``.
        obstacle: why the facts rule the route out; None if they do not.
    """

    transport: str
    encoding: str | None = None
    carrier: str | None = None
    bytes: int
    spans: Mapping[str, float]
    obstacle: str | None

    @property
    def label(self) -> str:
        """The name in tables: ``"delta ulp over disk"``."""
        return " ".join(filter(None, (self.transport, self.encoding, self.carrier and f"over {self.carrier}")))

    @property
    def seconds(self) -> float:
        """Seconds from the call until the engines serve the new weights."""
        return sum(self.spans.values())

    @property
    def pause_s(self) -> float:
        """Seconds during which the engines do not generate."""
        return self.spans["pause"]

    @property
    def low_s(self) -> float:
        """`seconds` with ``encode``, ``stage`` and ``pause`` divided by `UNCERTAINTY`."""
        return self._within(1 / UNCERTAINTY)

    @property
    def high_s(self) -> float:
        """`seconds` with ``encode``, ``stage`` and ``pause`` multiplied by `UNCERTAINTY`."""
        return self._within(UNCERTAINTY)

    def _within(self, factor: float) -> float:
        return sum(seconds * (factor if name in _UNCERTAIN else 1) for name, seconds in self.spans.items())

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-safe dictionary."""
        names = ("label", "transport", "encoding", "carrier", "bytes", "seconds", "pause_s", "spans")
        return {**{name: getattr(self, name) for name in names}, "seconds_low": self.low_s, "seconds_high": self.high_s}


def routes(facts: Facts) -> list[Route]:
    """Return every route, including those that the facts rule out, simplest first.

    ``ipc`` copies weights into a staging buffer and then into parameters, on one device. ``collective`` broadcasts them
    during the pause. ``sharded`` sends every trainer rank's shards as slices to the workers that need them, assuming
    one host's network per rank and per worker. ``disk`` writes files, reads them while engines generate, and loads them
    from the page cache. ``delta`` codes, sends and stages changes while engines generate, then writes them in place.
    """
    full, workers, on_host = facts.model_bytes, facts.workers_per_engine, facts.on_host
    control_s = _speed("control")
    copied_s = full / (_speed("copy") if on_host else facts.device_bytes_s)
    # each worker of a CPU engine copies its share
    loaded_s = full / workers / _speed("load") if on_host else full / facts.device_bytes_s
    received_s = loaded_s + control_s + facts.tensor_count * _speed("tensor")
    sent_s, links = _broadcast(facts, full), min(facts.trainer_ranks, workers)
    by_files = {
        "publish": _to_host(facts) + _published(facts, full),
        **_fetched(facts, full),
        "pause": full / workers / _speed("reload") + control_s,
    }
    apart = None if facts.colocated else "trainer and engines share no device"
    one_rank = "the trainer has one rank, which holds all that is to be sent" if facts.trainer_ranks == 1 else None
    rows: list[tuple[str, Mapping[str, float], str | None]] = [
        ("ipc", {"pause": copied_s + loaded_s + control_s}, apart),
        ("collective", {"pause": sent_s + received_s}, _no_group(facts)),
        ("sharded", {"pause": sent_s / links + received_s}, _no_group(facts) or one_rank),
        ("disk", by_files, _no_files(facts, full=True)),
    ]
    every = [Route(transport=name, bytes=round(full), spans=spans, obstacle=why) for name, spans, why in rows]
    for carrier in ("disk", "collective"):
        deltas = {encoding: _delta(facts, encoding, carrier) for encoding in ENCODINGS}
        # auto takes ulp, but where something else is sooner
        every += [replace(deltas["ulp"], encoding="auto"), *deltas.values()]
    return every


def _delta(facts: Facts, encoding: str, carrier: str) -> Route:
    coded, full = ENCODINGS[encoding], facts.model_bytes
    changed = max(1.0, facts.density * facts.parameters)
    bits = coded.place * _place_bits(facts.density) + coded.step
    size = min(full, bits * changed / 8)  # a delta that would be larger is sent as full weights
    coding_s = coded.effort * (full + _CHANGE_BYTES * changed) / (facts.code_bytes_s * facts.cores)
    if carrier == "disk":
        keyframe_s = _published(facts, full / _KEYFRAME_EVERY)
        carried = {"publish": _published(facts, size), "keyframe": keyframe_s, **_fetched(facts, size)}
        obstacle = _no_files(facts, full=False)
    else:
        carried, obstacle = {"send": _broadcast(facts, size)}, _no_group(facts)
    if facts.colocated:
        obstacle = "colocated engines receive weights by memory handles, which a delta would not make smaller"
    line = _LINE_BYTES / facts.bytes_per_parameter  # elements per line of memory
    share = full * (1 - (1 - facts.density) ** line) / facts.workers_per_engine  # bytes of lines with a change in them
    commit_s = share / (_speed("commit") if facts.on_host else facts.device_bytes_s)
    spans = {
        "encode": _to_host(facts) + coding_s,
        **carried,
        "stage": share / _speed("stage"),
        "pause": commit_s + _speed("control"),
    }
    return Route(
        transport="delta", encoding=encoding, carrier=carrier, bytes=round(size), spans=spans, obstacle=obstacle
    )


def _place_bits(density: float) -> float:
    """Return the minimum bits for the place of a changed element: a Bernoulli process's entropy, H(p) / p."""
    if density >= 1:
        return 0.0
    return -(math.log2(density) + (1 - density) / density * math.log2(1 - density))


# phases, in seconds


def _published(facts: Facts, size: float) -> float:
    """Return the seconds to publish from one host; a CPU host is at most as fast as the measured one."""
    return size / min(facts.disk_bytes_s, _speed("publish") if facts.on_host else math.inf)


def _fetched(facts: Facts, size: float) -> dict[str, float]:
    """Return the phases of reading: once into every other region, then by every engine from its region's store."""
    readers = math.ceil(facts.engines / facts.regions)
    fetch = {"fetch": max(size * readers / facts.disk_bytes_s, size / facts.network_bytes_s)}
    return {"cross": size / facts.wan_bytes_s, **fetch} if facts.regions > 1 else fetch


def _broadcast(facts: Facts, size: float) -> float:
    """Return the seconds of a broadcast: NCCL's hardly depend on the number of receivers; gloo sends down a tree."""
    if not facts.on_host:
        return size / facts.network_bytes_s
    levels = max(1, math.ceil(math.log2(1 + facts.engines * facts.workers_per_engine)))
    return size * levels / min(facts.network_bytes_s, _speed("broadcast"))


def _to_host(facts: Facts) -> float:
    """Return the seconds to copy the trainer's weights to host memory."""
    return 0.0 if facts.on_host else facts.model_bytes / facts.host_link_bytes_s


def _speed(name: str) -> float:
    return MEASURED[name].value


# obstacles


def _no_group(facts: Facts) -> str | None:
    if facts.colocated:
        return "two processes on one device cannot be ranks of one group"
    if not facts.group:
        return "trainer and engines cannot form a process group"
    if not facts.same_stack:
        return "a group needs compatible devices and libraries at both ends"
    if facts.regions > 1:
        return "a group does not reach over regions"
    return None


def _no_files(facts: Facts, *, full: bool) -> str | None:
    if facts.shared_path is None:
        return "trainer and engines share no path"
    if full and "://" in facts.shared_path.removeprefix("file://"):
        return "full versions are checkpoint directories, and an object store has none"
    return None
