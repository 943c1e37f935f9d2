"""Types shared by all layers; those sent between processes are frozen and JSON-safe."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import math
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import torch

from torchrl_ext.base.errors import ConfigError, ManifestError, WeightSyncError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["EngineInfo", "Info", "ParamMeta", "Part", "Wire", "dtype_from_name", "dtype_name", "is_torchrl"]

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
        return msgspec.convert(value, kind, dec_hook=decode_dtype)
    except (msgspec.ValidationError, ValueError, RecursionError) as cause:  # ValueError: a lone surrogate in a key
        raise error(f"{what} is malformed: {f'{cause}':.400}", state="unchanged") from None


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


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a loopback address or ``localhost``."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def is_torchrl(value: Any, name: str) -> bool:
    """Return whether a class of TorchRL's is among the bases, asked without importing it."""
    return any(base.__name__ == name and base.__module__.startswith("torchrl.") for base in type(value).__mro__)
