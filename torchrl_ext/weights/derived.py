"""Sources over another source: under other names, by a table of regular expressions, or in another dtype."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.checkpoint import with_dtype
from torchrl_ext.weights.source import WeightSource

__all__ = ["CastSource", "RenamedSource", "as_mapper", "regex_mapper"]


class RenamedSource(WeightSource):
    """Another source under other names.

    Args:
        source: the source to rename.
        mapper: trainer name -> checkpoint name.

    Raises:
        ManifestError: two names meet.
    """

    def __init__(self, source: WeightSource, mapper: Callable[[str], str]) -> None:
        self._source, self._mapper = source, mapper

    def params(self) -> tuple[ParamMeta, ...]:
        renamed: dict[str, str] = {}
        for meta in self._source.params():
            name = self._mapper(meta.name)
            if name in renamed:
                raise ManifestError(f"{renamed[name]!r} and {meta.name!r} both map to {name!r}", hint="mend the mapper")
            renamed[name] = meta.name
        return tuple(
            ParamMeta(name, meta.dtype, meta.shape) for name, meta in zip(renamed, self._source.params(), strict=True)
        )

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._source:
            yield self._mapper(name), tensor

    def held(self) -> Mapping[str, Tensor]:
        return {self._mapper(name): tensor for name, tensor in self._source.held().items()}

    def files(self) -> Mapping[str, bytes]:
        return self._source.files()


class CastSource(WeightSource):
    """Another source with its floating-point tensors cast on the way out (fp32 master weights to a bf16 engine).

    Args:
        source: the source to cast.
        dtype: target; integer and bool tensors stay as they are.
    """

    def __init__(self, source: WeightSource, dtype: torch.dtype) -> None:
        if not dtype.is_floating_point:
            raise ConfigError(f"cannot cast weights to {dtype}", expected="a floating-point dtype")
        self._source, self._dtype = source, dtype

    def params(self) -> tuple[ParamMeta, ...]:
        return tuple(
            ParamMeta(meta.name, self._dtype if meta.dtype.is_floating_point else meta.dtype, meta.shape)
            for meta in self._source.params()
        )

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._source:
            yield name, tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def held(self) -> Mapping[str, Tensor]:
        return {
            name: tensor
            for name, tensor in self._source.held().items()
            if tensor.dtype is self._dtype or not tensor.is_floating_point()
        }

    def files(self) -> Mapping[str, bytes]:
        return with_dtype(self._source.files(), self._dtype)


def regex_mapper(table: Mapping[str, str]) -> Callable[[str], str]:
    """A mapper that applies the first pattern which matches a whole name; other names stay.

    Args:
        table: pattern -> replacement (`re.Match.expand` syntax), tried in order.

    Raises:
        ConfigError: a pattern is no regular expression.
    """
    rules = []
    for pattern, replacement in table.items():
        try:
            rules.append((re.compile(pattern), replacement))
        except re.error as error:
            raise ConfigError(f"name pattern {pattern!r} is no regular expression: {error}") from None

    def mapper(name: str) -> str:
        for pattern, replacement in rules:
            match = pattern.fullmatch(name)
            if match:
                return match.expand(replacement)
        return name

    return mapper


def as_mapper(mapper: Callable[[str], str] | Mapping[str, str]) -> Callable[[str], str]:
    """A callable stays; a mapping becomes a `regex_mapper`."""
    return regex_mapper(mapper) if isinstance(mapper, Mapping) else mapper
