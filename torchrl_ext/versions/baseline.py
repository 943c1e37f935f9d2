"""The trainer's copy of what the newest version holds: deltas are taken against it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from torchrl_ext.codecs.base import Codec, Encoded
from torchrl_ext.codecs.pipeline import encode_tensors
from torchrl_ext.errors import ConfigError
from torchrl_ext.stores.routes import Held
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.digests import PositionDigest, position_digest
from torchrl_ext.weights.source import WeightSource, checked

__all__ = ["Baseline"]


class Baseline(WeightSource):
    """Copies of every tensor, their digests, and the version that they are.

    While a version is being made the copies are neither the old one nor the new one: `version` is None then, and stays
    so when the attempt fails. The next version is a full one in that case, which seeds the copies again.

    Args:
        device: where the copies are; by default on the host, pinned where the source's tensors are on a GPU.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._params: tuple[ParamMeta, ...] = ()
        self._tensors: dict[str, Tensor] = {}
        self._digests: dict[str, PositionDigest] = {}
        self._files: Mapping[str, bytes] = {}
        self.version: Held | None = None

    def params(self) -> tuple[ParamMeta, ...]:
        return self._params

    def files(self) -> Mapping[str, bytes]:
        return self._files

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((meta.name, self._tensors[meta.name]) for meta in self._params)

    def start(self, base: WeightSource, params: tuple[ParamMeta, ...]) -> None:
        """Seed with the tensors of ``base`` that ``params`` name, in their order.

        Raises:
            ConfigError: it lacks one of them, or has another one under its name.
        """
        held = {meta.name: meta for meta in base.params()}
        for meta in params:
            if held.get(meta.name) != meta:
                raise ConfigError(
                    f"the base checkpoint holds {held.get(meta.name, f'no {meta.name}')}",
                    expected=str(meta),
                    hint="pass as base= the checkpoint from which this policy was loaded, or nothing",
                )
        for _ in self.seed(_Part(base, frozenset(meta.name for meta in params))):
            pass
        self._params = params

    def fits(self, params: tuple[ParamMeta, ...]) -> bool:
        """Whether a delta of these parameters can be taken."""
        return self.version is not None and params == self._params

    def tensor(self, name: str) -> Tensor:
        """The copy of one tensor."""
        return self._tensors[name]

    def digests(self) -> dict[str, str]:
        """Position digest of every tensor, 32 hex digits."""
        return {name: digest.hex() for name, digest in self._digests.items()}

    def seeding(self, source: WeightSource) -> WeightSource:
        """``source``, of which each tensor that is iterated is kept; iterate to the end, then set `version`."""
        return _Seeding(self, source)

    def seed(self, source: WeightSource) -> Iterator[tuple[str, Tensor]]:
        """One pass of `seeding`."""
        self.version, self._params, self._files = None, source.params(), source.files()
        known, self._tensors, self._digests = self._tensors, {}, {}
        for meta, tensor in checked(source, self._params):
            copy = known.pop(meta.name, None)
            if copy is None or ParamMeta.of(meta.name, copy) != meta:
                pinned = self._device is None and tensor.is_cuda
                copy = torch.empty(meta.shape, dtype=meta.dtype, device=self._device or "cpu", pin_memory=pinned)
            copy.copy_(tensor)
            self._tensors[meta.name] = copy
            self._digests[meta.name] = position_digest(tensor if tensor.is_cuda else copy)
            yield meta.name, copy

    def encode(self, source: WeightSource, codec: Codec) -> Iterator[Encoded]:
        """What changed in each tensor since `version`; the copies follow. Iterate to the end, then set `version`."""
        self.version = None
        triples = ((meta.name, self._tensors[meta.name], tensor) for meta, tensor in checked(source, self._params))
        for change in encode_tensors(triples, codec, follow=True):
            name = change.meta.name
            if change.changed:
                if change.digest is None:
                    self._digests[name] = position_digest(self._tensors[name])
                else:
                    self._digests[name] = self._digests[name].plus(change.digest)
            yield change


class _Part(WeightSource):
    """Some tensors of a source."""

    def __init__(self, source: WeightSource, names: frozenset[str]) -> None:
        self._source, self._names = source, names

    def params(self) -> tuple[ParamMeta, ...]:
        return tuple(meta for meta in self._source.params() if meta.name in self._names)

    def files(self) -> Mapping[str, bytes]:
        return self._source.files()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in self._source if name in self._names)


class _Seeding(WeightSource):
    def __init__(self, baseline: Baseline, source: WeightSource) -> None:
        self._baseline, self._source = baseline, source

    def params(self) -> tuple[ParamMeta, ...]:
        return self._source.params()

    def files(self) -> Mapping[str, bytes]:
        return self._source.files()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._baseline.seed(self._source)
