"""Encodings of other libraries' deltas, tensor by tensor; and encodings of all kinds by name.

Our own encodings code blocks of streams (`torchrl_ext.codecs.blocks.BlockEncoding`). A `Codec` is a frozen dataclass
that encodes the change of one tensor as another library does, and decodes it.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from torchrl_ext.codecs.patch import Patch, same
from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.registry import encodings
from torchrl_ext.types import Info, ParamMeta

__all__ = ["Buffer", "Codec", "Encoded", "codec_from_json", "encodings", "make_codec"]

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """The coded change of one tensor.

    Attributes:
        meta: the parameter.
        codec: the codec that decodes ``payload``.
        payload: the coded bytes; empty if nothing changed.
        changed: number of changed units.
    """

    meta: ParamMeta
    codec: Codec
    payload: bytes
    changed: int


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """Another library's encoding of the change of a tensor. Bit-exact for every dtype of `unit_of`."""

    name: ClassVar[str]
    whole_base: ClassVar[bool] = False
    """Whether `decode` needs the old tensor."""
    container: ClassVar[str]
    """Layout of payloads in files; one of `torchrl_ext.registry.containers`."""

    @abstractmethod
    def encode(self, meta: ParamMeta, old: Tensor, new: Tensor) -> Encoded:
        """Code the change of one tensor, on any device; called from any thread, several at a time.

        Raises:
            ManifestError: the tensors do not have ``meta``'s dtype and shape.
            ConfigError: the encoding cannot carry the tensor.
        """

    @abstractmethod
    def decode(self, payload: Buffer, meta: ParamMeta, base: Tensor | None = None) -> Patch:
        """Return the change in a payload; the inverse of `encode`.

        Args:
            payload: untrusted bytes.
            meta: the parameter, from a trusted manifest, which bounds the memory that a payload can allocate.
            base: the old tensor, where ``whole_base``.

        Raises:
            IntegrityError: the payload does not fit this parameter; the message names it.
            ConfigError: ``base`` is needed.
        """

    def to_json(self) -> Info:
        """Return ``{"name": ..., settings}``, from which `codec_from_json` rebuilds the codec."""
        return {"name": self.name, **dataclasses.asdict(self)}

    def _base(self, meta: ParamMeta, base: Tensor | None) -> np.ndarray:
        if base is None:
            raise ConfigError(
                f"encoding {self.name!r} of {meta.name!r} cannot be decoded alone", hint="pass base=, the old tensor"
            )
        return same(meta, base)[0]


def make_codec(name: str) -> Any:
    """Return the encoding called ``name``: a `torchrl_ext.codecs.blocks.BlockEncoding`, or another library's `Codec`.

    Raises:
        ConfigError: the name is unknown.
    """
    return encodings.make(name)


def codec_from_json(info: Info) -> Any:
    """Return the encoding that its `to_json` described.

    Args:
        info: ``{"name": ..., settings}``.

    Raises:
        ManifestError: this process does not know the encoding, or it does not take these settings.
    """
    if not isinstance(info, dict) or not isinstance(info.get("name"), str):
        raise ManifestError(f"{info!r} does not describe a codec", expected='{"name": ..., settings}')
    try:
        return encodings.make(**info)
    except ConfigError as error:
        raise ManifestError(f"a delta has an unknown encoding: {error.what}", hint=error.hint) from error
