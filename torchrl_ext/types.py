"""The types that all layers share: what crosses a process boundary is a frozen, JSON-safe dataclass."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchrl_ext.errors import ManifestError

__all__ = [
    "PROOFS", "EngineInfo", "EngineRow", "Handoff", "Info", "ParamMeta", "Part", "SyncReport", "dtype_from_name",
    "dtype_name", "least",
]  # fmt: skip

Info = dict[str, Any]
"""A JSON-safe message: str, int, float, bool, None, and lists and dicts of these."""

API_KEY_VARIABLE = "TORCHRL_EXT_API_KEY"
"""Environment variable with the key that an embedded engine wants; commands that talk to engines send it."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: ``"bfloat16"`` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype of a name: `torch.bfloat16` for ``"bfloat16"``.

    Raises:
        ManifestError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) and name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise ManifestError(f"{name!r} is no dtype of torch {torch.__version__}")
    return dtype


def cast_hint(dtype: torch.dtype) -> str:
    """Return what to do where a trainer's weights are of another dtype than the ``dtype`` that an engine takes."""
    name = dtype_name(dtype)
    return f"give WeightSender dtype=torch.{name}, `torchrl-ext push` --dtype {name}, or the engine another --dtype"


@dataclass(frozen=True)
class ParamMeta:
    """One parameter in checkpoint coordinates: its name, dtype and full (unsharded) shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> ParamMeta:
        """Describe ``tensor``; a DTensor gives its global shape without a gather."""
        return cls(name, tensor.dtype, tuple(tensor.shape))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def to_json(self) -> list[Any]:
        """Return ``[name, dtype name, [sizes]]``: short, since a model has thousands."""
        return [self.name, dtype_name(self.dtype), list(self.shape)]

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> ParamMeta:
        """Make a description from its JSON row; the inverse of `to_json`.

        Raises:
            ManifestError: the row is malformed.
        """
        try:
            name, dtype, shape = row
            sizes = tuple(map(operator.index, shape))
            if not isinstance(name, str) or min(sizes, default=0) < 0 or max(sizes, default=0) >= 1 << 48:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise ManifestError(f"{row!r} does not describe a parameter", expected="[name, dtype, [sizes]]") from None
        return cls(name, dtype_from_name(dtype), sizes)

    def __str__(self) -> str:
        return f"{self.name} {dtype_name(self.dtype)}{list(self.shape)}"


@dataclass(frozen=True, kw_only=True)
class Part:
    """What an update says that brings some tensors: all others are as an earlier version has them.

    Attributes:
        base: that version; 0 stands for the weights that the engine was started with.
        names: of the tensors that the update brings, in checkpoint coordinates.
    """

    base: int
    names: frozenset[str]

    def to_json(self) -> Info:
        """Return the part as a JSON object, its names sorted."""
        return {"base": self.base, "names": sorted(self.names)}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Part:
        """Make a part from its JSON object; raise ManifestError where it is malformed, or names nothing."""
        base, names = told.get("base"), told.get("names")
        sound = type(base) is int and 0 <= base < 1 << 62 and isinstance(names, list) and names
        if sound and all(isinstance(name, str) for name in names or ()):
            return cls(base=base or 0, names=frozenset(names or ()))
        raise ManifestError(f"{told!r:.80} is no part of a model", expected='{"base": N, "names": ["...", ...]}')


def _nothing(*_: Any) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Handoff:
    """One version that is ready to be sent, or what engines need to join a transport.

    Attributes:
        info: JSON-safe; what the engine needs to know to receive it.
        ahead: moves what can be moved while engines still generate, beside their prefetch.
        transfer: moves the bytes, beside the engine's call; has nothing left to do for files.
        acknowledge: takes the oldest version that an engine may still read, now that this one is in service; what is
            older may go. None stands for workers without a control layer, of which nobody knows what they read.
    """

    info: Info
    ahead: Callable[[], None] = _nothing
    transfer: Callable[[], None] = _nothing
    acknowledge: Callable[[int | None], None] = _nothing


STOCK = ("disk", "native")
"""Transports that an engine can follow without anything of ours."""


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """The description of an engine, as discovery finds it.

    Attributes:
        url: base address, without a trailing slash.
        kind: ``"vllm"``, ``"sglang"``, ``"embedded"``, ...
        version: the engine's own version string.
        worker_type: ``"regular"``, ``"prefill"``, ``"decode"`` or ``"encoder"``.
        num_gpus: accelerators (or CPU workers) that the engine occupies.
        tp_size, pp_size, dp_size: parallel sizes.
        world_size: workers that receive weights: ``tp * pp * dp``.
        model: path or name of the model.
        weight_version: the label of the weights in service.
        transports: names of the transports that the engine can follow.
        bootstrap_port: where an engine that prefills meets those that decode (of vLLM, its NIXL connector's port); None
            for others.

    Example:
        >>> [info] = tx.discover(address)
        >>> info.kind, info.tp_size, info.weight_version
        ('embedded', 1, 'default')
    """

    url: str
    kind: str
    version: str = ""
    worker_type: str = "regular"
    num_gpus: int = 1
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    world_size: int = 1
    model: str = ""
    weight_version: str = ""
    transports: tuple[str, ...] = ()
    bootstrap_port: int | None = None

    @property
    def stock(self) -> bool:
        """Whether the engine runs without our plugin, and still follows: what it loaded, outputs alone can show."""
        return self.kind != "embedded" and bool(self.transports) and {*self.transports} <= {*STOCK}


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """One engine's row in a report.

    Attributes:
        engine: URL, or another name a person recognises.
        kind: as in `EngineInfo`.
        state: ``"serving"`` (the new version), ``"paused"`` (the update failed) or ``"unreachable"``.
        version: version in service, or the last one known to be.
        pause_s: seconds from the pause's acknowledgement to the resume's.
        error: what went wrong, or None.
        proof: what it proves of the version that it serves; see `SyncReport`.
        max_gap, mean_gap: the largest and the mean absolute difference between the engine's log-probabilities of the
            probe and the trainer's, in nats (`torchrl_ext.proof.outputs`); infinite where one is no number, and None
            where nobody compared them.
    """

    engine: str
    kind: str
    state: str
    version: int | None = None
    pause_s: float = 0.0
    error: str | None = None
    proof: str = "sent"
    max_gap: float | None = None
    mean_gap: float | None = None


PROOFS = ("sent", "in place", "rehearsed", "outputs")
"""What an update can prove, the least first; `SyncReport` says what each stands for."""


def least(proofs: Iterable[str]) -> str:
    """Return the least of several proofs; ``"sent"`` where there are none, or where one of them is unknown."""
    found = {*proofs}
    if not found <= {*PROOFS}:
        return PROOFS[0]
    return min(found, key=PROOFS.index, default=PROOFS[0])


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """The report of one `update_weights`: what it sent, and what each engine serves.

    Attributes:
        version: the version that the engines serve now.
        transport: name of the transport.
        tensors: number of tensors that travelled.
        bytes: bytes of weights that the transport moved or published (payload, once, whatever the fan-out).
        model_bytes: bytes of the whole model, so ``bytes / model_bytes`` is what the transport saved.
        density: changed elements / all elements; 1.0 for a full update.
        spans: seconds by phase: ``connect`` and ``rehearse`` (before a first update), ``prepare`` (it contains
            ``publish``), ``prefetch``, ``pause`` (it contains ``transfer``), ``probe``, and ``total``.
        engines: one row per engine.
        verified: every engine compared digests with the trainer's, and `proof` is ``"in place"`` or more.
        proof: the least that an engine proves. ``"sent"``: it confirms the bytes that it was handed. ``"in place"``:
            they were read back from what it computes with; where a version came as changes, a part of them, and all
            within `torchrl_ext.landing.patcher.READ_BACK_VERSIONS` versions. ``"rehearsed"``: they were handed over on
            a route that was shown, on this engine, to bring all that it computes with to where a cold start brings it.
            ``"outputs"``: its log-probabilities are the trainer's.
        rank_bytes: bytes that each trainer rank sent; empty where the transport does not count them.
        worker_bytes: bytes that each worker received; empty where the transport does not count them.
        whole: tensors that went the full route although trainer or engine is sharded -> the reason.
        part: some tensors were sent (``only=``), and engines kept the others; `proof` is of those that were sent.

    Example:
        >>> sender = tx.WeightSender(tx.make_transport("disk", root=root), tx.connect(address))
        >>> sender.register_model(lm)
        >>> report = sender.update_weights()
        >>> [(row.kind, row.state, row.version) for row in report.engines], sorted(report.spans)[:3]
        ([('embedded', 'serving', 1)], ['connect', 'pause', 'prefetch'])
        >>> sender.shutdown()
    """

    version: int
    transport: str
    tensors: int = 0
    bytes: int = 0
    model_bytes: int = 0
    density: float = 1.0
    spans: Mapping[str, float] = field(default_factory=dict)
    engines: tuple[EngineRow, ...] = ()
    verified: bool = False
    proof: str = "sent"
    rank_bytes: tuple[int, ...] = ()
    worker_bytes: tuple[int, ...] = ()
    whole: Mapping[str, str] = field(default_factory=dict)
    part: bool = False

    def to_json(self) -> Info:
        """Return a JSON-safe dictionary of every field; an infinite gap is ``"inf"``, as JSON has no such number."""
        rest = {"spans": dict(self.spans), "whole": dict(self.whole)}
        return dataclasses.asdict(self, dict_factory=_finite) | rest


def _finite(fields: Iterable[tuple[str, Any]]) -> Info:
    return {name: str(value) if value in (math.inf, -math.inf) else value for name, value in fields}


def is_loopback(host: str) -> bool:
    """Return whether this machine alone reaches ``host``: a loopback address, or ``localhost``."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
