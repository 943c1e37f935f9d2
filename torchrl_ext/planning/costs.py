"""Predicts what an update costs by each route: every phase is an amount divided by a speed.

Speeds of links, stores and devices are facts about the deployment. What facts cannot tell stands in `MEASURED` and
`ENCODINGS`, as ``torchrl-ext bench`` printed it on two shared x86-64 cores with torch's CPU build.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torchrl_ext.planning.facts import Facts

__all__ = ["ENCODINGS", "MEASURED", "UNCERTAINTY", "Encoding", "Measured", "Route", "Span", "routes"]

_KEYFRAME_EVERY = 25  # the delta transport's default
_LINE_BYTES = 64  # memory is read and written in lines of this size
_CHANGE_BYTES = 25  # coding one changed element takes as long as comparing this many bytes, whatever the encoding

UNCERTAINTY = 2.0
"""A phase that was measured, and not given as a fact, takes from a half to twice as long as predicted."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One number that a benchmark gave: a value, its unit (such as ``"bytes/s"``) and the command that measures it."""

    value: float
    unit: str
    command: str


_LANDING, _TRANSPORT = "python -m tests.bench landing", "torchrl-ext bench transport"
MEASURED: Mapping[str, Measured] = MappingProxyType(
    {
        "control": Measured(value=0.026, unit="s", command=f"{_LANDING} --engine vllm"),
        "tensor": Measured(value=1.2e-4, unit="s", command=_TRANSPORT),
        "broadcast": Measured(value=1.4e9, unit="bytes/s", command=_TRANSPORT),
        "publish": Measured(value=3.8e8, unit="bytes/s", command=_TRANSPORT),
        "copy": Measured(value=5e9, unit="bytes/s", command="torchrl-ext bench delta"),
        "load": Measured(value=8.4e9, unit="bytes/s", command=_LANDING),
        "reload": Measured(value=1.3e9, unit="bytes/s", command=_LANDING),
        "stage": Measured(value=4.5e9, unit="bytes/s", command=_LANDING),
        "commit": Measured(value=1.4e10, unit="bytes/s", command=_LANDING),
    }
)
"""``control``: the calls around a pause. ``tensor``: one more tensor in a broadcast. ``broadcast``: gloo between two
processes. ``publish``: checksummed and written. ``copy``: into a staging buffer. ``load``: from memory into parameters.
``reload``: from files into parameters. ``stage`` and ``commit``: a delta's memory lines, decoded and written."""


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """The size and the effort of one encoding of deltas, as measured.

    Attributes:
        place: bits for the place of a changed element, as a multiple of the least possible (`place_bits`).
        step: further bits per changed element.
        effort: time to find and code changes, as a multiple of the quickest encoding's.
    """

    place: float
    step: float
    effort: float


ENCODINGS: Mapping[str, Encoding] = MappingProxyType(
    {
        "ulp": Encoding(place=1.05, step=1.7, effort=1.0),
        "context": Encoding(place=0.77, step=1.05, effort=1.75),
        "xor": Encoding(place=2.03, step=6.1, effort=1.5),
        "overwrite": Encoding(place=0.94, step=27.7, effort=1.7),
        "indices": Encoding(place=0.0, step=48.0, effort=1.7),  # 32 bit for a place, 16 for a value
        "deltas": Encoding(place=0.0, step=32.0, effort=1.7),  # 16 bit for the gap to the last place, 16 for a value
    }
)


@dataclass(frozen=True, kw_only=True)
class Span:
    """One phase of an update, with its predicted length.

    Attributes:
        name: ``encode``, ``publish``, ``keyframe``, ``cross`` (between regions), ``fetch``, ``send``, ``stage``, or
            ``pause``.
        seconds: predicted.
        spread: the factor by which it may be shorter or longer; 1 where only facts went in.
    """

    name: str
    seconds: float
    spread: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Route:
    """One route that an update can take, with its predicted phases.

    Attributes:
        transport: name of the transport.
        encoding: of deltas; None for full updates.
        carrier: ``"disk"`` or ``"collective"`` for deltas, else None.
        bytes: published or sent, once, whatever the fan-out.
        spans: phases in order; engines generate in all but ``pause``.
        obstacle: why the facts rule it out; None where they do not.
    """

    transport: str
    encoding: str | None = None
    carrier: str | None = None
    bytes: int = 0
    spans: tuple[Span, ...] = ()
    obstacle: str | None = None

    @property
    def label(self) -> str:
        """The name in tables: ``"delta ulp over disk"``."""
        return " ".join(filter(None, (self.transport, self.encoding, self.carrier and f"over {self.carrier}")))

    @property
    def seconds(self) -> float:
        """Seconds from the call to the engines' new weights in service."""
        return sum(span.seconds for span in self.spans)

    @property
    def pause_s(self) -> float:
        """Seconds in which the engines do not generate."""
        return sum(span.seconds for span in self.spans if span.name == "pause")

    @property
    def low_s(self) -> float:
        """`seconds` when every phase is as short as it may be."""
        return sum(span.seconds / span.spread for span in self.spans)

    @property
    def high_s(self) -> float:
        """`seconds` when every phase is as long as it may be."""
        return sum(span.seconds * span.spread for span in self.spans)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-safe dictionary."""
        names = ("label", "transport", "encoding", "carrier", "bytes", "seconds", "pause_s")
        told = {name: getattr(self, name) for name in names}
        return {**told, "seconds_low": self.low_s, "seconds_high": self.high_s, "spans": list(map(vars, self.spans))}


def routes(facts: Facts) -> list[Route]:
    """Return every route, those that the facts rule out included, in the order of their simplicity.

    ``ipc``: weights are copied into a staging buffer and then into parameters, on one device. ``collective``: they are
    broadcast in the pause. ``sharded``: every trainer rank sends its own shards, and every worker gets its own slices;
    each rank and each worker is taken to have the network of one host. ``disk``: files are written, read while engines
    generate, and loaded from the page cache. ``delta``: see `_delta`.
    """
    size, control_s = facts.model_bytes, _speed("control")
    copied_s = size / (_speed("copy") if facts.on_host else facts.device_bytes_s)
    # each worker of a CPU engine copies its share
    workers = facts.workers_per_engine
    loaded_s = size / workers / _speed("load") if facts.on_host else size / facts.device_bytes_s
    beside_s = loaded_s + control_s + facts.tensor_count * _speed("tensor")
    sent_s, links = _broadcast(facts, size), min(facts.trainer_ranks, workers)
    no_group, one_rank = _no_group(facts), "the trainer has one rank, which holds all that is to be sent"
    by_files = [
        Span(name="publish", seconds=_to_host(facts) + _published(facts, size)),
        *_fetched(facts, size),
        _measured("pause", size / workers / _speed("reload") + control_s),
    ]
    full = [
        (
            "ipc",
            [_measured("pause", copied_s + loaded_s + control_s)],
            None if facts.colocated else "trainer and engines share no device",
        ),
        ("collective", [_measured("pause", sent_s + beside_s)], no_group),
        (
            "sharded",
            [_measured("pause", sent_s / links + beside_s)],
            no_group or (one_rank if facts.trainer_ranks == 1 else None),
        ),
        ("disk", by_files, _no_files(facts, full=True)),
    ]
    return [
        *(
            Route(transport=name, bytes=round(size), spans=tuple(spans), obstacle=obstacle)
            for name, spans, obstacle in full
        ),
        *(_delta(facts, encoding, carrier) for carrier in ("disk", "collective") for encoding in ("auto", *ENCODINGS)),
    ]


def _delta(facts: Facts, encoding: str, carrier: str) -> Route:
    """Changes are coded, sent and staged while engines generate, then written in place."""
    if encoding == "auto":  # it takes the one that lands soonest, tensor by tensor
        best = min((_delta(facts, one, carrier) for one in ("ulp", "context")), key=lambda route: route.seconds)
        return replace(best, encoding="auto")
    coded, full = ENCODINGS[encoding], facts.model_bytes
    changed = max(1.0, facts.density * facts.parameters)
    bits = coded.place * _place_bits(facts.density) + coded.step
    size = min(full, bits * changed / 8)  # a delta that would be larger is sent as full weights
    coding_s = coded.effort * (full + _CHANGE_BYTES * changed) / (facts.code_bytes_s * facts.cores)
    spans = [_measured("encode", _to_host(facts) + coding_s)]
    if carrier == "disk":
        keyframe = Span(name="keyframe", seconds=_published(facts, full / _KEYFRAME_EVERY))
        spans += [Span(name="publish", seconds=_published(facts, size)), keyframe, *_fetched(facts, size)]
        obstacle = _no_files(facts, full=False)
    else:
        spans.append(Span(name="send", seconds=_broadcast(facts, size)))
        obstacle = _no_group(facts)
    if facts.colocated:
        obstacle = "colocated engines take weights by memory handles, and a delta would not make those smaller"
    line = _LINE_BYTES / facts.bytes_per_parameter  # elements per line of memory
    share = full * (1 - (1 - facts.density) ** line) / facts.workers_per_engine  # bytes of lines with a change in them
    commit_s = share / (_speed("commit") if facts.on_host else facts.device_bytes_s)
    spans += [_measured("stage", share / _speed("stage")), _measured("pause", commit_s + _speed("control"))]
    return Route(
        transport="delta", encoding=encoding, carrier=carrier, bytes=round(size), spans=tuple(spans), obstacle=obstacle
    )


def _place_bits(density: float) -> float:
    """Return the least bits per changed element for its place: a Bernoulli process's entropy, H(p) / p."""
    if density >= 1:
        return 0.0
    return -(math.log2(density) + (1 - density) / density * math.log2(1 - density))


# phases, in seconds


def _published(facts: Facts, size: float) -> float:
    """Return the seconds in which one host publishes; a CPU's host is no faster than was measured."""
    return size / min(facts.disk_bytes_s, _speed("publish") if facts.on_host else math.inf)


def _fetched(facts: Facts, size: float) -> list[Span]:
    """Return the phases of reading: once into every other region, then by every engine of a region from its store."""
    cross = [Span(name="cross", seconds=size / facts.wan_bytes_s)] if facts.regions > 1 else []
    readers = math.ceil(facts.engines / facts.regions)
    fetch_s = max(size * readers / facts.disk_bytes_s, size / facts.network_bytes_s)
    return [*cross, Span(name="fetch", seconds=fetch_s)]


def _broadcast(facts: Facts, size: float) -> float:
    """Return the seconds of a broadcast.

    NCCL forwards while it still receives, so that the number of receivers hardly counts; gloo sends down a tree.
    """
    if not facts.on_host:
        return size / facts.network_bytes_s
    levels = max(1, math.ceil(math.log2(1 + facts.engines * facts.workers_per_engine)))
    return size * levels / min(facts.network_bytes_s, _speed("broadcast"))


def _to_host(facts: Facts) -> float:
    """Return the seconds to copy the trainer's weights to where they can be compared or written."""
    return 0.0 if facts.on_host else facts.model_bytes / facts.host_link_bytes_s


def _measured(name: str, seconds: float) -> Span:
    return Span(name=name, seconds=seconds, spread=UNCERTAINTY)


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
        return "there is no path that trainer and engines both see"
    if full and "://" in facts.shared_path.removeprefix("file://"):
        return "full versions are checkpoint directories, and an object store has none"
    return None
