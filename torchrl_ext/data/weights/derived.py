"""Sources over another source: under other names (by a function, a table of regular expressions, or those of its
checkpoint, `torchrl_ext.data.weights.hf_names`), in another dtype, with some tensors replaced, or with PEFT's LoRA
weights
merged; and `as_source`, which picks the source of any weights."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, final
from weakref import WeakSet

import torch
from torch import Tensor, nn

from torchrl_ext.base.errors import ConfigError, ManifestError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.weights.blocks import Shard, require_whole
from torchrl_ext.data.weights.checkpoint import CheckpointSource, with_dtype
from torchrl_ext.data.weights.hf_names import SameWeights, groups_of, shards_of_part
from torchrl_ext.data.weights.source import (
    MappingSource,
    ModuleSource,
    Row,
    RowSource,
    WeightSource,
    full,
    gathered_in_order,
    inner_model,
    is_mapping,
    is_tensordict_module,
    model_files,
    named_tensors,
    same_memory,
    unwrapped,
)

__all__ = ["ConvertedSource", "MappedSource", "PeftSource", "as_mapper", "as_source", "converted", "is_peft"]

log = logging.getLogger("torchrl_ext")

_PREFIX = "base_model.model."


def is_peft(module: nn.Module) -> bool:
    """Return whether ``module`` is, or contains, a module that PEFT has adapted; never imports peft."""
    if "peft" not in sys.modules:  # then nobody can have made one
        return False
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(part, (PeftModel, BaseTunerLayer)) for part in module.modules())


class PeftSource(RowSource):
    """The merged weights of a LoRA module under the names of its base checkpoint.

    A weight with active adapters is sent as ``W + sum_i scaling_i B_i A_i`` (Hu et al. 2021, equation 3; each term by
    PEFT's own ``get_delta_weight``), computed out of place for one tensor at a time. Layers in ``modules_to_save``
    are sent as trained. Adapters that are disabled, inactive or already merged into the base are not added.

    Args:
        module: a ``PeftModel``, or a module that contains one.

    Raises:
        ConfigError: a layer, which the message names, has an adapter other than plain LoRA of a linear, embedding, 2-d
            or 3-d convolution layer (DoRA, prompt tuning, ...).
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._wrappers()

    def rows(self) -> Iterable[Row]:
        for name, tensor, layer in self._layers():
            made = "" if layer is None else "adapters are merged into it"
            yield Row(name, tensor, partial(_merged, tensor, layer), made)

    def files(self) -> Mapping[str, bytes]:
        return model_files(self._module)

    def _layers(self) -> Iterator[tuple[str, Tensor, Any]]:
        """Yield checkpoint name, live tensor, and the LoRA layer that adds to it; tied tensors once."""
        layers, saved = self._wrappers()
        seen: set[Any] = set()
        names: set[str] = set()
        for name, tensor in named_tensors(self._module):
            path = _kept(name, layers, saved)
            if path is None:
                continue
            layer = layers.get(path.removesuffix(".base_layer.weight"))
            layer = layer if layer is not None and _active(layer) else None
            checkpoint_name = path.replace(_PREFIX, "").replace(".base_layer.", ".")
            if checkpoint_name in names:
                raise ManifestError(f"two tensors of the adapted module are called {checkpoint_name!r}")
            names.add(checkpoint_name)
            key = (same_memory(tensor), id(layer))
            if key not in seen:
                seen.add(key)
                yield checkpoint_name, tensor, layer

    def _wrappers(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return LoRA layers by path; and for each ``modules_to_save`` wrapper the child in use, by path."""
        from peft import PeftModel
        from peft.tuners.lora import Conv2d, Conv3d, Embedding, Linear, LoraModel
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

        layers, saved = {}, {}
        for path, part in self._module.named_modules(remove_duplicate=False):
            if isinstance(part, PeftModel) and not isinstance(part.base_model, LoraModel):
                raise _refused(path, type(part.base_model).__name__)
            if isinstance(part, ModulesToSaveWrapper):
                off = part.disable_adapters or not part.active_adapters
                saved[path] = "original_module" if off else f"modules_to_save.{part.active_adapters[0]}"
            elif isinstance(part, AuxiliaryTrainingWrapper):
                raise _refused(path, type(part).__name__)
            elif isinstance(part, BaseTunerLayer):
                if not isinstance(part, (Linear, Embedding, Conv2d, Conv3d)):
                    raise _refused(path, type(part).__name__)
                for adapter in _active(part):
                    if part.lora_bias.get(adapter):
                        raise _refused(path, "LoRA with a bias")
                    if adapter in part.lora_variant:
                        raise _refused(path, type(part.lora_variant[adapter]).__name__)
                layers[path] = part
        return layers, saved


@torch.no_grad()
def _merged(tensor: Tensor, layer: Any) -> Tensor:
    """Return a full weight, with what the active adapters of its layer, if it has any, add to it."""
    if layer is not None:
        tensor = tensor.detach().clone()
        for adapter in _active(layer):
            tensor += layer.get_delta_weight(adapter)  # a wider adapter is rounded once, after the addition
    return full(tensor)


def _active(layer: Any) -> list[str]:
    """Return the adapters of a LoRA layer that its output contains and its base weight does not."""
    if layer.disable_adapters:
        return []
    present = {*layer.lora_A.keys(), *layer.lora_embedding_A.keys()}
    return [name for name in layer.active_adapters if name in present and name not in layer.merged_adapters]


def _kept(name: str, layers: Mapping[str, Any], saved: Mapping[str, str]) -> str | None:
    """Return the path of a parameter without its `modules_to_save` part; None for parameters of adapters."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        path = ".".join(parts[:end])
        rest = ".".join(parts[end:])
        if path in layers and not rest.startswith("base_layer."):
            return None
        if path in saved:
            return f"{path}.{rest.removeprefix(saved[path] + '.')}" if rest.startswith(saved[path] + ".") else None
    return name


def _refused(path: str, kind: str) -> ConfigError:
    return ConfigError(
        f"the adapter {kind} at {path or 'the root'!r} cannot be merged on the way out",
        expected="plain LoRA of linear, embedding and (2-d, 3-d) convolution layers, and modules_to_save",
        hint="call merge_and_unload() on a copy and send the copy, or pass your own WeightSource",
    )


_examined: WeakSet[nn.Module] = WeakSet()  # modules whose extra state was looked for


class MappedSource(WeightSource):
    """Another source under other names, or in another dtype.

    Args:
        source: the source.
        rename: trainer name -> checkpoint name, or what `as_mapper` takes; None keeps the names.
        dtype: of the floating-point tensors, cast as they are sent (float32 master weights to a bfloat16 engine);
            integer and bool tensors stay as they are. None casts nothing.

    Raises:
        ConfigError: ``dtype`` is no floating-point dtype, or a pattern is not a regular expression.
        ManifestError: in `params`, where two names map to one.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        rename: Callable[[str], str] | Mapping[str, str] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(f"cannot cast weights to {dtype}", expected="a floating-point dtype")
        self._source, self._dtype = source, dtype
        self._rename = str if rename is None else as_mapper(rename)

    def params(self) -> tuple[ParamMeta, ...]:
        firsts, found = dict[str, str](), list[ParamMeta]()
        for meta in self._source.params():
            mapped = self._mapped(meta)
            first = firsts.setdefault(mapped.name, meta.name)
            if first != meta.name:
                raise ManifestError(
                    f"{first!r} and {meta.name!r} both map to {mapped.name!r}", hint="correct the mapper"
                )
            found.append(mapped)
        return tuple(found)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._source:
            yield self._rename(name), self._cast(tensor)

    def pairs(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        own = {meta.name for meta in self._source.params() if self._rename(meta.name) in names}
        for name, tensor in self._source.pairs(own):
            yield self._rename(name), self._cast(tensor)

    def shards(self) -> Iterator[Shard]:
        """Yield the blocks that this rank holds, not cast yet: the copy to where they are sent from casts them.

        It rounds as a cast of the whole does, bit by bit; only the payload of a NaN that is widened may differ.
        """
        for shard in self._source.shards():
            yield replace(shard, meta=self._mapped(shard.meta))

    def held(self) -> Mapping[str, Tensor]:
        return {
            self._rename(name): tensor
            for name, tensor in self._source.held().items()
            if self._dtype in (None, tensor.dtype) or not tensor.is_floating_point()
        }

    def tied(self) -> Mapping[str, str]:
        return {self._rename(name): self._rename(via) for name, via in self._source.tied().items()}

    def files(self) -> Mapping[str, bytes]:
        files = self._source.files()
        return files if self._dtype is None else with_dtype(files, self._dtype)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor if self._dtype is None or not tensor.is_floating_point() else tensor.to(self._dtype)

    def _mapped(self, meta: ParamMeta) -> ParamMeta:
        dtype = meta.dtype if self._dtype is None or not meta.dtype.is_floating_point else self._dtype
        return ParamMeta(self._rename(meta.name), dtype, meta.shape)


def as_mapper(mapper: Callable[[str], str] | Mapping[str, str]) -> Callable[[str], str]:
    """Return a callable as it is, and for a table one that applies the first pattern which matches a whole name.

    Args:
        mapper: a callable, or pattern -> replacement (`re.Match.expand` syntax), tried in order; other names stay.

    Raises:
        ConfigError: a pattern is not a regular expression.
    """
    if not isinstance(mapper, Mapping):
        return mapper
    rules = []
    for pattern, replacement in mapper.items():
        try:
            rules.append((re.compile(pattern), replacement))
        except re.error as error:
            raise ConfigError(f"name pattern {pattern!r} is not a regular expression: {error}") from None

    def mapped(name: str) -> str:
        for pattern, replacement in rules:
            match = pattern.fullmatch(name)
            if match:
                return match.expand(replacement)
        return name

    return mapped


@final
class ConvertedSource(WeightSource):
    """Another source under checkpoint names.

    Args:
        source: of a module's tensors, under their names there.
        groups: how they become checkpoint tensors; what is in no group, or in one that is not complete, stays as it is.

    Raises:
        ManifestError: in `params`, where two tensors meet under one checkpoint name.
    """

    def __init__(self, source: RowSource, groups: Iterable[SameWeights]) -> None:
        self._source = source
        self._groups = tuple(groups)
        self._group_of = {name: group for group in self._groups for name in group.sources}

    def params(self) -> tuple[ParamMeta, ...]:
        found: dict[str, ParamMeta] = {}
        for group, rows in self._batches():
            tensors = {row.name: row.tensor for row in rows}
            metas = [ParamMeta.of(*pair) for pair in tensors.items()] if group is None else group.params(tensors)
            for meta in metas:
                if meta.name in found:
                    raise ManifestError(
                        f"{meta.name!r} is given twice: once stacked or renamed, and once under its own name"
                    )
                found[meta.name] = meta
        return tuple(found.values())

    def pairs(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Begin a pass over the tensors of these names; a group of which one is meant is taken as a whole."""
        for group, rows in self._batches():
            results = [rows[0].name] if group is None else group.results
            if names is None or any(name in names for name in results):
                yield from (pair for pair in _made(group, rows) if names is None or pair[0] in names)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.pairs()

    def shards(self) -> Iterator[Shard]:
        """Yield the blocks that this rank holds, under the names of the checkpoint.

        Where a checkpoint tensor is a part of one of the module's, they are views of what this rank holds of that one.
        Those that only a copy makes, of several tensors or in another order of elements, are gathered.
        """
        for group, rows in self._batches():
            if group is None:
                yield from rows[0].shards()
                continue
            metas = group.params({row.name: row.tensor for row in rows})
            local = list(rows[0].shards()) if group.walks else []
            why = next((shard.why for shard in local if shard.gathers), "" if group.walks else _COPIED)
            if why:
                yield from gathered_in_order(metas, map(itemgetter(1), _made(group, rows)), why)
                continue
            for walk, meta in zip(group.walks, metas, strict=True):
                yield from shards_of_part(meta, walk, local)

    def held(self) -> Mapping[str, Tensor]:
        live, found = self._source.held(), {}
        for group, rows in self._batches():
            name = rows[0].name
            if group is None and name in live:
                found[name] = live[name]
            elif group is not None and not group.copied and name in live and group.lies_in(live[name]):
                found |= group.parts(live[name])
        return found

    def tied(self) -> Mapping[str, str]:
        renamed = {}
        for group in self._groups:
            if len(group.sources) == len(group.results) == 1:
                renamed[next(iter(group.sources))] = next(iter(group.results))
        return {renamed.get(name, name): renamed.get(via, via) for name, via in self._source.tied().items()}

    def files(self) -> Mapping[str, bytes]:
        return self._source.files()

    def _batches(self) -> Iterator[tuple[SameWeights | None, list[Row]]]:
        """Yield what is taken together, in the order of the source: a group, or a tensor that keeps its name."""
        rows, begun = {row.name: row for row in self._source.rows()}, set()
        for name, row in rows.items():
            group = self._group_of.get(name)
            if group is None or not group.fits({one: rows[one].tensor for one in group.sources if one in rows}):
                yield None, [row]
            elif group not in begun:
                begun.add(group)
                yield group, [rows[one] for one in group.sources]


_COPIED = "its checkpoint tensor combines several blocks of the module's tensor"


def _made(group: SameWeights | None, rows: Iterable[Row]) -> Iterator[tuple[str, Tensor]]:
    """Yield what a batch becomes; nothing here keeps its tensors while the next ones are gathered."""
    undo = dict if group is None else group.undo
    yield from undo({row.name: row.take() for row in rows}).items()


def converted(source: RowSource, module: nn.Module) -> WeightSource:
    """Return ``source``, or what it has under checkpoint names where ``module`` has other ones.

    Args:
        source: of tensors under the names of ``module``, or under those of the checkpoint already.
        module: a `transformers` model, or a module that contains one; for any other ``source`` stays as it is.
    """
    merged = isinstance(source, PeftSource)  # whose names are not those of the module
    groups = groups_of(module, (lambda: (row[:2] for row in source.rows())) if merged else None)
    if isinstance(source, MappingSource) and groups:
        names = {row.name for row in source.rows()}
        others = {name for group in groups for name in group.results}
        sources = {name for group in groups for name in group.sources}
        if not names & (sources - others) and names & (others - sources):  # checkpoint names, some known here as well
            return source
    return ConvertedSource(source, groups) if groups else source


def as_source(weights: Any) -> WeightSource:
    """Return the source for any weights: a WeightSource, module, TensorDict, mapping or checkpoint directory.

    A `transformers` module is sent under the names of its checkpoint (`torchrl_ext.data.weights.hf_names`); a wrapper
    is replaced by its `inner_model`.

    Raises:
        ConfigError: the type is not supported, or FSDP1 holds the module in pieces.
    """
    if isinstance(weights, WeightSource):
        return weights
    weights = inner_model(weights)
    if isinstance(weights, nn.Module) and not is_tensordict_module(weights):
        require_whole(weights)
        _tell_of_extra_state(weights)
        return converted(PeftSource(weights) if is_peft(weights) else ModuleSource(weights), weights)
    if is_mapping(weights) or is_tensordict_module(weights):
        return MappingSource(weights)
    if isinstance(weights, (str, os.PathLike)):
        return CheckpointSource(weights)
    raise ConfigError(
        f"a {type(weights).__name__} holds no weights that can be sent",
        expected="an nn.Module, a TensorDict, a mapping of tensors, a checkpoint directory or a WeightSource",
    )


def _tell_of_extra_state(module: nn.Module) -> None:
    """Warn once of what a module has beside its parameters and buffers, which is not sent."""
    if module in _examined:
        return
    _examined.add(module)
    inherited, parts = nn.Module.get_extra_state, module.named_modules()
    found = [unwrapped(path) or "the model" for path, part in parts if type(part).get_extra_state is not inherited]
    if found:
        log.warning("get_extra_state of %s is not sent: only parameters and buffers are", ", ".join(found))
