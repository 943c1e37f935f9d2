"""The types that all layers share: what crosses a process boundary is a frozen, JSON-safe dataclass."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import ipaddress
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import torch

from torchrl_ext.errors import ConfigError, ManifestError, WeightSyncError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "PROOFS", "EngineInfo", "EngineRow", "Info", "ParamMeta", "Part", "SyncReport", "Wire", "dtype_from_name",
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


T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
_Size = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]


def decoded(value: Any, kind: type[T], what: str, error: type[WeightSyncError] = ConfigError) -> T:
    """Return the object of type ``kind`` that a JSON value from another process stands for.

    Args:
        value: the value.
        kind: any type that msgspec converts to, which may contain `torch.dtype`; types are strict.
        what: names the value in errors.
        error: the class of these errors.

    Raises:
        WeightSyncError: of class ``error``; it has the path of the field and its bound.
    """
    try:
        return msgspec.convert(value, kind, dec_hook=_decode_dtype)
    except (msgspec.ValidationError, ValueError, RecursionError) as cause:  # ValueError: half a surrogate pair in a key
        raise error(f"{what} is malformed: {f'{cause}':.400}", state="unchanged") from None


def _decode_dtype(kind: type, value: Any) -> Any:
    assert kind is torch.dtype, kind  # no other type of ours is unknown to msgspec
    try:
        return dtype_from_name(value)
    except ManifestError as error:
        raise ValueError(error.what) from None


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """The base of what one process sends to another as a JSON object; fields that it lacks are ignored."""

    def to_json(self) -> Info:
        """Return the struct as a JSON object."""
        fields: Info = msgspec.to_builtins(self, order="deterministic", enc_hook=dtype_name)
        return fields

    @classmethod
    def from_json(cls, info: Any, what: str = "") -> Self:
        """Decode a JSON object; the inverse of `to_json`.

        Args:
            info: the object.
            what: names it in errors, ``"the offer of transport 'disk'"``.

        Raises:
            ConfigError: a field is missing, of another type or out of bounds; it is named.
        """
        return decoded(info, cls, what or cls.__name__)


@functools.lru_cache(maxsize=4096)
def _sizes(shape: torch.Size) -> tuple[int, ...]:
    """Return a shape as a tuple, of which tensors of one shape share one: a model has thousands of few shapes."""
    return tuple(shape)


class ParamMeta(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One parameter in checkpoint coordinates: its name, dtype and full (unsharded) shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[_Size, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> ParamMeta:
        """Describe ``tensor``; a DTensor gives its global shape without a gather."""
        return cls(name, tensor.dtype, _sizes(tensor.shape))

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
        return decoded(row, cls, f"the row {reprlib.repr(row)} of a parameter", ManifestError)

    def __str__(self) -> str:
        return f"{self.name} {dtype_name(self.dtype)}{list(self.shape)}"


Params = tuple[ParamMeta, ...]


class Part(Wire, frozen=True, kw_only=True):
    """Names the tensors of a partial update, and the version that holds the others.

    Attributes:
        base: that version; 0 stands for the weights that the engine was started with.
        names: of the tensors that the update brings, in checkpoint coordinates.
    """

    base: Count
    names: Annotated[frozenset[str], msgspec.Meta(min_length=1)]


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
        """Whether the engine follows without our plugin; only its outputs can show which weights it loaded."""
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
        finite: no tensor at which this process looked has a NaN or an infinity; None where it did not look.

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
    finite: bool | None = None

    def to_json(self) -> Info:
        """Return a JSON-safe dictionary of every field; an infinite gap is ``"inf"``, as JSON has no such number."""
        rest = {"spans": dict(self.spans), "whole": dict(self.whole)}
        return dataclasses.asdict(self, dict_factory=_finite) | rest


def _finite(fields: Iterable[tuple[str, Any]]) -> Info:
    return {name: str(value) if value in (math.inf, -math.inf) else value for name, value in fields}


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches ``host``: a loopback address, or ``localhost``."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
