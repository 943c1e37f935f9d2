"""What an update costs by each road: seconds, bytes and the engines' pause, from facts and fitted coefficients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchrl_ext.planning.facts import Facts
from torchrl_ext.planning.fits import CODED, LINE_BYTES, Fit, lines_touched, place_bits

__all__ = ["ENCODINGS", "CostModel", "Road", "Span", "roads"]

ENCODINGS = ("auto", *CODED, "indices", "deltas")
KEYFRAME_EVERY = 25  # the delta transport's default


@dataclass(frozen=True, kw_only=True)
class Span:
    """One phase of an update.

    Attributes:
        name: ``encode``, ``publish``, ``keyframe``, ``cross`` (between regions), ``fetch``, ``send``, ``stage``, or
            ``pause``.
        seconds: predicted.
        spread: the factor by which the rounds of the benchmark behind it differed; 1 where only facts went in.
    """

    name: str
    seconds: float
    spread: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Road:
    """One way for an update to travel.

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
        """A name for tables: ``"delta ulp over disk"``."""
        return " ".join(filter(None, (self.transport, self.encoding, self.carrier and f"over {self.carrier}")))

    @property
    def seconds(self) -> float:
        """From the call to the engines' new weights in service."""
        return sum(span.seconds for span in self.spans)

    @property
    def pause_s(self) -> float:
        """Seconds in which the engines do not generate."""
        return sum(span.seconds for span in self.spans if span.name == "pause")

    @property
    def low_s(self) -> float:
        """`seconds` when every phase is as fast as in the fastest round of its benchmark."""
        return sum(span.seconds / span.spread for span in self.spans)

    @property
    def high_s(self) -> float:
        """`seconds` when every phase is as slow as in the slowest one."""
        return sum(span.seconds * span.spread for span in self.spans)


def roads(facts: Facts, fit: Fit) -> list[Road]:
    """Every road, those that the facts rule out included, in the order of their simplicity."""
    model = CostModel(facts, fit)
    found = [model.ipc(), model.collective(), model.disk()]
    for carrier in ("disk", "collective"):
        found += [model.delta(encoding, carrier) for encoding in ENCODINGS]
    return found


class CostModel:
    """Costs under one set of facts."""

    def __init__(self, facts: Facts, fit: Fit) -> None:
        self.facts, self.fit = facts, fit
        self.size = facts.parameters * facts.bytes_per_parameter
        self.changed = max(1.0, facts.density * facts.parameters)

    # roads

    def ipc(self) -> Road:
        """Copied into a staging buffer, and from there into the parameters; both on the device that is shared."""
        copy = self._at("copy", self.size) if self._on_host else self._on_device(self.size)
        pause = [copy, self._loaded(), self._at("control")]
        return Road(transport="ipc", bytes=round(self.size), spans=(_sum("pause", pause),), obstacle=self._no_ipc())

    def collective(self) -> Road:
        """Broadcast while engines are paused."""
        pause = [*self._broadcast(self.size), self._loaded(), self._at("control")]
        pause.append(self._at("collective_tensor", self.facts.tensor_count))
        return Road(
            transport="collective", bytes=round(self.size), spans=(_sum("pause", pause),), obstacle=self._no_group()
        )

    def disk(self) -> Road:
        """Written, read by every engine while it generates, and loaded from its page cache."""
        spans = (*self._to_host("publish"), self._published("publish", self.size), *self._spread_out(self.size))
        share = self.size / self.facts.workers_per_engine
        pause = _sum("pause", [self._at("reload", share), self._at("control")])
        return Road(transport="disk", bytes=round(self.size), spans=(*spans, pause), obstacle=self._no_files(full=True))

    def delta(self, encoding: str, carrier: str) -> Road:
        """Coded, published or broadcast and staged while engines generate; then what changed is written in place."""
        if encoding == "auto":  # what it does, per tensor: take the one that lands soonest
            best = min((self.delta(one, carrier) for one in ("ulp", "context")), key=lambda road: road.seconds)
            return replace(best, encoding="auto")
        size, coding = self._coded(encoding)
        spans = [coding]
        if carrier == "disk":
            spans += [self._published("publish", size), self._keyframes(), *self._spread_out(size)]
        else:
            spans.append(_sum("send", self._broadcast(size)))
        spans += [self._staged(), self._committed()]
        return Road(
            transport="delta",
            encoding=encoding,
            carrier=carrier,
            bytes=round(size),
            spans=tuple(spans),
            obstacle=self._no_delta(carrier),
        )

    # phases

    def _at(self, name: str, count: float = 1.0, phase: str = "pause") -> Span:
        coefficient = self.fit[name]
        return Span(name=phase, seconds=coefficient.value * count, spread=coefficient.spread)

    def _coded(self, encoding: str) -> tuple[float, Span]:
        """Bytes of a delta and the time to find and code it. Where they would exceed the model's, it is sent whole."""
        width = 8 * self.facts.bytes_per_parameter
        if encoding in CODED:
            bits = self.fit[f"{encoding}_bits_place"].value * place_bits(self.facts.density)
            bits += self.fit[f"{encoding}_bits_step"].value
            speed = encoding
        else:  # 32 bit for a place; or 16 for the gap to the last one, unless some gap needs 32
            gaps = encoding == "deltas" and self.facts.density > 2e-4
            bits, speed = (16 if gaps else 32) + width, "overwrite"
        cores = self.fit["threads"].value / max(1, self.facts.cores)
        parts = [
            *self._to_host("encode"),
            self._at(f"{speed}_encode_byte", self.size * cores),
            self._at(f"{speed}_encode_change", self.changed * cores),
        ]
        return min(self.size, bits * self.changed / 8), _sum("encode", parts)

    def _published(self, phase: str, size: float) -> Span:
        """Checksummed and written by one host."""
        wire = Span(name=phase, seconds=size / self.facts.disk_bytes_s)
        own = self._at("publish", size, phase)
        return max(wire, own, key=lambda span: span.seconds) if self._on_host else wire

    def _keyframes(self) -> Span:
        """A full version beside every 25th delta, spread over all of them."""
        return replace(self._published("keyframe", self.size / KEYFRAME_EVERY), name="keyframe")

    def _spread_out(self, size: float) -> list[Span]:
        """Once into every other region, then to every engine of a region from its store."""
        facts = self.facts
        spans = [Span(name="cross", seconds=size / facts.wan_bytes_s)] if facts.regions > 1 else []
        readers = math.ceil(facts.engines / facts.regions)
        fetch_s = max(size * readers / facts.disk_bytes_s, size / facts.network_bytes_s)
        return [*spans, Span(name="fetch", seconds=fetch_s)]

    def _broadcast(self, size: float) -> list[Span]:
        """NCCL forwards piece by piece, so that the number of receivers hardly counts; gloo sends down a tree."""
        facts = self.facts
        if not self._on_host:
            return [Span(name="pause", seconds=size / facts.network_bytes_s)]
        levels = max(1, math.ceil(math.log2(1 + facts.engines * facts.workers_per_engine)))
        wire = Span(name="pause", seconds=size * levels / facts.network_bytes_s)
        return [max(wire, self._at("collective", size * levels), key=lambda span: span.seconds)]

    @property
    def _on_host(self) -> bool:
        return self.facts.device == "cpu"

    def _on_device(self, size: float) -> Span:
        """Read and written once in the memory of the accelerators of one engine."""
        return Span(name="pause", seconds=2 * size / self.facts.workers_per_engine / self.facts.device_bytes_s)

    def _to_host(self, phase: str) -> list[Span]:
        """The trainer's weights copied to where they can be compared or written."""
        return [] if self._on_host else [Span(name=phase, seconds=self.size / self.facts.host_link_bytes_s)]

    def _loaded(self) -> Span:
        """Copied into the parameters, of which each worker holds its share."""
        if self._on_host:
            return self._at("load", self.size / self.facts.workers_per_engine)
        return self._on_device(self.size)

    def _staged(self) -> Span:
        share = 1 / self.facts.workers_per_engine
        parts = [self._at("stage_once"), self._at("stage_line", share * self._lines())]
        return _sum("stage", [*parts, self._at("stage_change", share * self.changed)])

    def _committed(self) -> Span:
        lines, control = self._lines() / self.facts.workers_per_engine, self._at("control")
        if not self._on_host:
            return _sum("pause", [self._on_device(LINE_BYTES * self._lines()), control])
        return _sum("pause", [self._at("commit_once"), self._at("commit_line", lines), control])

    def _lines(self) -> float:
        return lines_touched(self.facts.parameters, self.facts.density, self.facts.bytes_per_parameter)

    # obstacles

    def _no_ipc(self) -> str | None:
        return None if self.facts.colocated else "trainer and engines share no device"

    def _no_group(self) -> str | None:
        facts = self.facts
        if facts.colocated:
            return "two processes on one device cannot be ranks of one group"
        if not facts.group:
            return "trainer and engines cannot form a process group"
        if not facts.same_stack:
            return "a group needs compatible devices and libraries at both ends"
        if facts.regions > 1:
            return "a group does not reach over regions"
        return None

    def _no_files(self, full: bool) -> str | None:
        path = self.facts.shared_path
        if path is None:
            return "there is no path that trainer and engines both see"
        if full and "://" in path.removeprefix("file://"):
            return "full versions are checkpoint directories, and an object store has none"
        return None

    def _no_delta(self, carrier: str) -> str | None:
        if self.facts.colocated:
            return "colocated engines take weights by memory handles, and a delta would not make those smaller"
        return self._no_files(full=False) if carrier == "disk" else self._no_group()


def _sum(name: str, parts: Sequence[Span]) -> Span:
    """One phase of several terms."""
    seconds = sum(part.seconds for part in parts)
    spread = sum(part.seconds * part.spread for part in parts) / seconds if seconds else 1.0
    return Span(name=name, seconds=seconds, spread=spread)
