"""Types shared by all layers; those sent between processes are frozen and JSON-safe."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import ipaddress
import math
import os
import reprlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import torch

from torchrl_ext.base import reports
from torchrl_ext.base.errors import ConfigError, ManifestError, WeightSyncError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "PROOFS", "EngineInfo", "EngineRow", "Info", "ParamMeta", "Part", "SyncReport", "Wire", "dtype_from_name",
    "dtype_name", "least",
]  # fmt: skip

Info = dict[str, Any]
"""A JSON-safe dict: its values are str, int, float, bool, None, and lists and dicts of these."""

API_KEY_VARIABLE = "TORCHRL_EXT_API_KEY"
"""Environment variable with the API key that an embedded engine requires and that our commands send to engines."""


VERSIONS = 10**18
"""Versions have smaller numbers, since their names and the pointer to the newest take 18 digits."""


def label_number(label: str) -> int | None:
    """Return the version number that an engine's label is; None for a name, as longer numbers are, too."""
    return int(label) if label.isascii() and label.isdecimal() and len(label) < len(str(VERSIONS)) else None


@functools.cache
def _dtypes() -> dict[str, torch.dtype]:
    """Return torch's dtypes by name: a table, since a manifest names one for each of very many parameters."""
    return {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name: ``"bfloat16"`` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype with this name: `torch.bfloat16` for ``"bfloat16"``.

    Raises:
        ManifestError: torch has no dtype of this name.
    """
    dtype = _dtypes().get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ManifestError(f"{name!r} is not a dtype of torch {torch.__version__}")
    return dtype


def cast_hint(wanted: Iterable[tuple[str, torch.dtype]]) -> str:
    """Return the hint for an engine that expects tensors in these dtypes when the trainer's have others.

    Args:
        wanted: names and dtypes; only floating-point ones can be cast.
    """
    names: dict[torch.dtype, list[str]] = {}
    for name, dtype in wanted:
        if dtype.is_floating_point:
            names.setdefault(dtype, []).append(name)
    if len(names) > 1:  # WeightSender's dtype= is one for all
        said = "; ".join(f"{dtype_name(dtype)} for {len(own)}, such as {own[0]!r}" for dtype, own in names.items())
        return (
            f"the engine keeps tensors in several dtypes ({said}): leave dtype= out, and send a mapping of them in "
            "those, update_weights({name: tensor.to(...)})"
        )
    name = dtype_name(next(iter(names), torch.float32))
    return f"give WeightSender dtype=torch.{name}, `torchrl-ext push` --dtype {name}, or the engine another --dtype"


T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Shape = tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**48)], ...]


def decoded(value: Any, kind: type[T], what: str, error: type[WeightSyncError] = ConfigError) -> T:
    """Convert a JSON value from another process to ``kind``.

    Args:
        value: the JSON value.
        kind: any type that msgspec supports, in strict mode; it may contain `torch.dtype`.
        what: the value's name in errors.
        error: the class of the error raised.

    Raises:
        WeightSyncError: an ``error`` that gives the path of the invalid field and its bound.
    """
    try:
        return msgspec.convert(value, described(kind), dec_hook=decode_dtype)
    except (msgspec.ValidationError, ValueError, RecursionError) as cause:  # ValueError: a lone surrogate in a key
        raise error(f"{what} is malformed: {f'{cause}':.400}", state="unchanged") from None


_described: set[Any] = set()
_describing = threading.RLock()  # a finalizer may read at any time, also while it is held
os.register_at_fork(before=_describing.acquire, after_in_parent=_describing.release, after_in_child=_describing.release)


def described(kind: type[T]) -> type[T]:
    """Return ``kind``, which any number of threads can have msgspec read from here on.

    msgspec describes a struct when it first reads one, and another thread that reads it meanwhile ends the process
    (seen with 0.22: a null pointer in ``_core``).
    """
    if kind not in _described:
        with _describing:
            msgspec.json.Decoder(kind, dec_hook=decode_dtype)
            _described.add(kind)
    return kind


def decode_dtype(kind: type, value: Any) -> Any:
    """Decode the name of a dtype, for msgspec's ``dec_hook``; raise ValueError if torch has none of this name."""
    assert kind is torch.dtype, kind  # the only type used here that msgspec does not know
    try:
        return dtype_from_name(value)
    except ManifestError as error:
        raise ValueError(error.what) from None


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of structs that one process sends to another as JSON; unknown fields are ignored."""

    def to_json(self) -> Info:
        """Return the struct as a JSON-safe dict."""
        fields: Info = msgspec.to_builtins(self, order="deterministic", enc_hook=dtype_name)
        return fields

    @classmethod
    def from_json(cls, info: Any, what: str = "") -> Self:
        """Decode a JSON object; the inverse of `to_json`.

        Args:
            info: the JSON object.
            what: its name in errors, such as ``"the offer of transport 'disk'"``.

        Raises:
            ConfigError: a field is missing, has the wrong type or is out of bounds; the message names it.
        """
        return decoded(info, cls, what or cls.__name__)


@functools.lru_cache(maxsize=4096)
def _sizes(shape: torch.Size) -> tuple[int, ...]:
    """Return a shape as a tuple, cached because a model's thousands of tensors have only a few shapes."""
    return tuple(shape)


class ParamMeta(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One parameter in checkpoint coordinates: its name, dtype and full (unsharded) shape."""

    name: str
    dtype: torch.dtype
    shape: Shape

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> ParamMeta:
        """Describe ``tensor``; for a DTensor, this takes the global shape without a gather."""
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
        """Return ``[name, dtype name, [sizes]]``, a compact form because a model has thousands of parameters."""
        return [self.name, dtype_name(self.dtype), list(self.shape)]

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> ParamMeta:
        """Decode a JSON row; the inverse of `to_json`.

        Raises:
            ManifestError: the row is malformed.
        """
        return decoded(row, cls, f"the row {reprlib.repr(row)} of a parameter", ManifestError)

    @property
    def form(self) -> str:
        """Its dtype and shape: ``float32[2, 3]``."""
        return f"{dtype_name(self.dtype)}{list(self.shape)}"

    def __str__(self) -> str:
        return f"{self.name} {self.form}"


Params = tuple[ParamMeta, ...]


class Part(Wire, frozen=True, kw_only=True):
    """The tensors of a partial update, and the version that it builds on.

    Attributes:
        base: version that provides all other tensors; 0 is the weights that the engine was started with.
        names: names of the tensors that the update sends, in checkpoint coordinates.
    """

    base: Count
    names: Annotated[frozenset[str], msgspec.Meta(min_length=1)]


STOCK = ("disk", "native")
"""Transports that an engine without our plugin can use."""


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """An engine as found by discovery.

    Attributes:
        url: base address, without a trailing slash.
        kind: ``"vllm"``, ``"sglang"``, ``"embedded"``, ...
        version: the engine's own version string.
        worker_type: ``"regular"``, ``"prefill"`` or ``"decode"``.
        num_gpus: accelerators (or CPU workers) that the engine occupies.
        tp_size, pp_size, dp_size: parallel sizes.
        world_size: workers that receive weights: ``tp * pp * dp``.
        model: path or name of the model.
        weight_version: the label of the weights in service.
        transports: names of the transports that the engine supports.
        bootstrap_port: port at which decode engines reach a prefill engine of SGLang; None for other engines.

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
        """Whether the engine runs without our plugin; then only its outputs can show which weights it loaded."""
        return self.kind != "embedded" and bool(self.transports) and {*self.transports} <= {*STOCK}


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """One engine's row in a report.

    Attributes:
        engine: URL, or another readable name.
        kind: as in `EngineInfo`.
        state: ``"serving"`` (the new version), ``"paused"`` (the update failed) or ``"unreachable"``.
        version: version in service, or the last known one.
        pause_s: seconds from the pause's acknowledgement to the resume's.
        error: error message, or None.
        proof: what the engine proves about the version that it serves; see `SyncReport`.
        max_gap, mean_gap: largest and mean absolute difference between the engine's and the trainer's log-probabilities
            of the probe, in nats (`torchrl_ext.sync.outputs`); infinite if one is NaN, None if they were not compared.
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
"""Levels of proof, weakest first; `SyncReport` defines them."""


def least(proofs: Iterable[str]) -> str:
    """Return the weakest of several proofs; ``"sent"`` if there are none or one is unknown."""
    found = {*proofs}
    if not found <= {*PROOFS}:
        return PROOFS[0]
    return min(found, key=PROOFS.index, default=PROOFS[0])


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """The result of one `update_weights` call: what it sent, and what each engine serves.

    Attributes:
        version: version that the engines serve now.
        transport: name of the transport.
        tensors: number of tensors sent.
        bytes: bytes of weights that the transport sent or published, counted once for all engines.
        model_bytes: bytes of the whole model.
        density: changed elements / all elements; 1.0 for a full update.
        spans: seconds by phase: ``connect`` and ``rehearse`` (before a first update), ``prepare`` (includes
            ``publish``), ``prefetch``, ``pause`` (includes ``transfer``), ``probe``, and ``total``.
        engines: one row per engine.
        verified: every engine compared digests with the trainer's, and `proof` is at least ``"in place"``.
        proof: the weakest proof among the engines. ``"sent"``: the engine confirms the bytes that it received.
            ``"in place"``: the engine read them back from the tensors that it computes with; of an update that sends
            changes, it reads back a fraction each time, and all weights within
            `torchrl_ext.data.landing.patcher.READ_BACK_VERSIONS` versions. ``"rehearsed"``: they took a route that a
            rehearsal on this engine showed to give the same state as a cold start. ``"outputs"``: the engine's
            log-probabilities match the trainer's.
        rank_bytes: bytes that each trainer rank sent; empty if the transport does not count them.
        worker_bytes: bytes that each worker received; empty if the transport does not count them.
        encoding: how changes were coded; empty for a full update.
        whole: tensors sent unsharded although the trainer or the engine is sharded -> the reason.
        part: only some tensors were sent (``only=``) and engines kept the others; `proof` covers those that were sent.
        error: why the update failed (the report is `UpdateError.report`); None if every engine serves the version.
        began: Unix time at which the update began, in seconds; 0.0 if unknown.
        timeline: each run of a phase, with its start and end in seconds since ``began``, in the order in which they
            ended. A phase that runs again after a failure appears again.

    Example:
        >>> sender = tx.WeightSender(tx.make_transport("disk", root=root), tx.connect(address))
        >>> sender.register_model(lm)
        >>> report = sender.update_weights()
        >>> [(row.kind, row.state, row.version) for row in report.engines], sorted(report.spans)[:3]
        ([('embedded', 'serving', 1)], ['connect', 'pause', 'prefetch'])
        >>> print(report.table().splitlines()[0])  # print(report) shows the whole table
        version 1 by disk: served by 1 of 1 engine(s), proof: in place
        >>> report.scalars()["sync/engines_serving"]
        1.0
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
    encoding: str = ""
    whole: Mapping[str, str] = field(default_factory=dict)
    part: bool = False
    error: str | None = None
    began: float = 0.0
    timeline: tuple[reports.Phase, ...] = ()

    def scalars(self) -> dict[str, float]:
        """Return the report's numbers under flat keys, for loggers.

        ===========================  ====================================================================
        ``sync/version``             the version
        ``sync/engines``             engines in the report
        ``sync/engines_serving``     engines that serve this version
        ``sync/total_s``             seconds that the update took
        ``sync/pause_s``             the longest pause of an engine, in seconds; with engines only
        ``sync/phase/PHASE_s``       seconds of each phase of `spans`, such as ``sync/phase/prepare_s``
        ``sync/bytes``               as `bytes`; like the next four, left out if the update failed
        ``sync/model_bytes``         as `model_bytes`
        ``sync/tensors``             as `tensors`
        ``sync/density``             as `density`, from 0 to 1
        ``sync/verified``            1.0 if `verified`, else 0.0
        ``sync/max_gap``             the largest `EngineRow.max_gap`, in nats; with ``verify="outputs"`` only
        ===========================  ====================================================================
        """
        return reports.scalars(self)

    def table(self) -> str:
        """Return the report as plain text: bytes, proof, a line per phase, and a line per engine with its address."""
        return reports.table(self)

    def __str__(self) -> str:
        return self.table()

    def __rich__(self) -> Any:
        from rich.text import Text  # rich calls this

        return Text(self.table())

    def plot(self, ax: Any = None) -> Any:
        """Draw when each phase ran, one row per phase; the pause is red.

        Args:
            ax: matplotlib axes to draw on; None makes a figure.

        Returns:
            The axes.

        Raises:
            ConfigError: matplotlib, which the extra ``plot`` installs, is missing.
        """
        return reports.plot(self, ax)

    @staticmethod
    def plot_history(history: Sequence[SyncReport], axes: Any = None) -> Any:
        """Draw the bytes and the longest pause of each update over the version; dotted lines mark failed updates.

        Args:
            history: the reports of some updates.
            axes: two matplotlib axes, for bytes and for pauses; None makes a figure.

        Returns:
            The axes.

        Raises:
            ConfigError: matplotlib, which the extra ``plot`` installs, is missing.
        """
        return reports.plot_history(history, axes)

    def to_json(self) -> Info:
        """Return all fields as a JSON-safe dict; an infinite gap becomes ``"inf"``, because JSON has no infinity."""
        rest = {"spans": dict(self.spans), "whole": dict(self.whole)}
        return dataclasses.asdict(self, dict_factory=_finite) | rest


def _finite(fields: Iterable[tuple[str, Any]]) -> Info:
    return {name: str(value) if value in (math.inf, -math.inf) else value for name, value in fields}


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a loopback address or ``localhost``."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
