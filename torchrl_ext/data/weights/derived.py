"""Sources over another source: under other names (by a function, or those of its checkpoint,
`torchrl_ext.data.weights.hf_names`), in another dtype, or with PEFT's LoRA weights merged; and `as_source`, which picks
the source of any weights."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import starmap
from typing import Any, final

import torch
from torch import Tensor, nn

from torchrl_ext.base.errors import ConfigError, ManifestError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.weights.blocks import Shard, require_whole
from torchrl_ext.data.weights.checkpoint import CheckpointSource, with_dtype
from torchrl_ext.data.weights.hf_names import PEFT, SameWeights, groups_of, shards_of_part
from torchrl_ext.data.weights.source import (
    LiveSource,
    MappingSource,
    ModuleSource,
    WeightSource,
    gathered_in_order,
    inner_model,
    is_mapping,
    is_tensordict_module,
    model_files,
    same_memory,
    unwrapped,
)

__all__ = ["ConvertedSource", "MappedSource", "PeftSource", "as_source", "converted", "is_peft"]


def is_peft(module: nn.Module) -> bool:
    """Return whether ``module`` is, or contains, a module that PEFT has adapted; never imports peft."""
    if "peft" not in sys.modules:  # then nobody can have made one
        return False
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(part, (PeftModel, BaseTunerLayer)) for part in module.modules())


class PeftSource(LiveSource):
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
        self._adapted: dict[str, Any] = {}  # names of the last listing -> the LoRA layer that adds to the tensor
        for _ in _parts("", module):
            pass

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        self._adapted = {}
        for path, part, layer in _parts("", self._module):
            kept = {key: one for key, one in part._buffers.items() if key not in part._non_persistent_buffers_set}
            for key, tensor in (part._parameters | kept).items():
                name = unwrapped(f"{path}.{key}".lstrip(".")).replace(PEFT, "")
                if layer is not None and key == "weight" and _active(layer):
                    self._adapted[name] = layer
                if tensor is not None:
                    yield name, tensor

    @torch.no_grad()
    def take(self, name: str, tensor: Tensor) -> Tensor:
        if name in self._adapted:
            layer, tensor = self._adapted[name], tensor.detach().clone()
            for adapter in _active(layer):
                tensor += layer.get_delta_weight(adapter)  # a wider adapter is rounded once, after the addition
        return super().take(name, tensor)

    def makes(self, name: str) -> str:
        return "adapters are merged into it" if name in self._adapted else ""

    def _key(self, name: str, tensor: Tensor) -> tuple[Any, ...]:
        return *same_memory(tensor), id(self._adapted.get(name))

    def files(self) -> Mapping[str, bytes]:
        return model_files(self._module)


def _parts(path: str, part: Any) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield the modules whose own tensors are sent: path without PEFT's parts of layers, and the LoRA layer around it.

    Raises:
        ConfigError: names an adapter that cannot be merged.
    """
    from peft import PeftModel
    from peft.tuners.lora import Conv2d, Conv3d, Embedding, Linear, LoraModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    layer = None
    if isinstance(part, ModulesToSaveWrapper):
        off = part.disable_adapters or not part.active_adapters
        yield from _parts(path, part.original_module if off else part.modules_to_save[part.active_adapters[0]])
        return
    if isinstance(part, PeftModel) and not isinstance(part.base_model, LoraModel):
        raise _refused(path, type(part.base_model).__name__)
    plain = isinstance(part, (Linear, Embedding, Conv2d, Conv3d))
    if isinstance(part, AuxiliaryTrainingWrapper) or (isinstance(part, BaseTunerLayer) and not plain):
        raise _refused(path, type(part).__name__)
    if plain:
        for adapter in _active(part):
            if part.lora_bias.get(adapter):
                raise _refused(path, "LoRA with a bias")
            if adapter in part.lora_variant:
                raise _refused(path, type(part.lora_variant[adapter]).__name__)
        layer, part = part, part.base_layer
    yield path, part, layer
    for name, child in part._modules.items():
        if child is not None:
            yield from _parts(f"{path}.{name}" if path else name, child)


def _active(layer: Any) -> list[str]:
    """Return the adapters of a LoRA layer that its output contains and its base weight does not."""
    if layer.disable_adapters:
        return []
    present = {*layer.lora_A.keys(), *layer.lora_embedding_A.keys()}
    return [name for name in layer.active_adapters if name in present and name not in layer.merged_adapters]


def _refused(path: str, kind: str) -> ConfigError:
    return ConfigError(
        f"the adapter {kind} at {path or 'the root'!r} cannot be merged on the way out",
        expected="plain LoRA of linear, embedding and (2-d, 3-d) convolution layers, and modules_to_save",
        hint="call merge_and_unload() on a copy and send the copy, or pass your own WeightSource",
    )


class MappedSource(WeightSource):
    """Another source under other names, or in another dtype.

    Args:
        source: the source.
        rename: trainer name -> checkpoint name; None keeps the names.
        dtype: of the floating-point tensors, cast as they are sent (float32 master weights to a bfloat16 engine);
            integer and bool tensors stay as they are. None casts nothing.

    Raises:
        ConfigError: ``dtype`` is no floating-point dtype.
        ManifestError: in `params`, where two names map to one.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        rename: Callable[[str], str] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(f"cannot cast weights to {dtype}", expected="a floating-point dtype")
        self._source, self._dtype = source, dtype
        self._rename = str if rename is None else rename

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


@final
class ConvertedSource(WeightSource):
    """Another source under checkpoint names.

    Args:
        source: of a module's tensors, under their names there.
        groups: how they become checkpoint tensors; what is in no group, or in one that is not complete, stays as it is.

    Raises:
        ManifestError: in `params`, where two tensors meet under one checkpoint name.
    """

    def __init__(self, source: LiveSource, groups: Iterable[SameWeights]) -> None:
        self._source = source
        self._group_of = {name: group for group in groups for name in group.sources}

    def params(self) -> tuple[ParamMeta, ...]:
        found: dict[str, ParamMeta] = {}
        for group, live in self._batches():
            for meta in starmap(ParamMeta.of, live.items()) if group is None else group.params(live):
                if meta.name in found:
                    raise ManifestError(
                        f"{meta.name!r} is given twice: as a part of what is stacked or renamed, and by its own name"
                    )
                found[meta.name] = meta
        return tuple(found.values())

    def pairs(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Begin a pass over the tensors of these names; a group of which one is meant is taken as a whole."""
        for group, live in self._batches():
            if names is None or any(name in names for name in (live if group is None else group.results)):
                yield from (pair for pair in self._made(group, live) if names is None or pair[0] in names)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.pairs()

    def shards(self) -> Iterator[Shard]:
        """Yield the blocks that this rank holds, under the names of the checkpoint.

        Where a checkpoint tensor is a part of one of the module's, they are views of what this rank holds of that one.
        Those that only a copy makes, of several tensors or in another order of elements, are gathered.
        """
        for group, live in self._batches():
            shards = [shard for pair in live.items() for shard in self._source.shards_of(*pair)]
            if group is None:
                yield from shards
                continue
            metas, why = group.params(live), "its checkpoint tensor combines several blocks of the module's tensor"
            if group.walks:
                why = next((shard.why for shard in shards if shard.gathers), "")
            if why:
                yield from gathered_in_order(metas, (tensor for _, tensor in self._made(group, live)), why)
                continue
            for walk, meta in zip(group.walks, metas, strict=True):
                yield from shards_of_part(meta, walk, shards)

    def held(self) -> Mapping[str, Tensor]:
        held, found = self._source.held(), dict[str, Tensor]()
        for group, live in self._batches():
            if live.keys() <= held.keys():
                found |= {name: held[name] for name in live} if group is None else group.parts(held)
        return found

    def tied(self) -> Mapping[str, str]:
        renamed = dict[str, str]()
        for group in self._group_of.values():
            if len(group.sources) == len(group.results) == 1:
                renamed |= zip(group.sources, group.results, strict=True)
        return {renamed.get(name, name): renamed.get(via, via) for name, via in self._source.tied().items()}

    def files(self) -> Mapping[str, bytes]:
        return self._source.files()

    def _batches(self) -> Iterator[tuple[SameWeights | None, dict[str, Tensor]]]:
        """Yield live tensors that are taken together, in the order of the source: a group's, or one of no group."""
        sent, begun = self._source.sent(), set()
        for name, tensor in sent.items():
            group = self._group_of.get(name)
            if group is None or not group.fits(sent):
                yield None, {name: tensor}
            elif group not in begun:
                begun.add(group)
                yield group, {one: sent[one] for one in group.sources}

    def _made(self, group: SameWeights | None, live: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield what a batch becomes; nothing here keeps its tensors while the next ones are gathered."""
        undo = dict if group is None else group.undo
        yield from undo({name: self._source.take(name, tensor) for name, tensor in live.items()}).items()


def converted(source: LiveSource, module: nn.Module) -> WeightSource:
    """Return ``source``, or what it has under checkpoint names where ``module`` has other ones.

    Args:
        source: of tensors under the names of ``module``, or under those of the checkpoint already.
        module: a `transformers` model, or a module that contains one; for any other ``source`` stays as it is.
    """
    merged = isinstance(source, PeftSource)  # whose names are not those of the module
    groups = groups_of(module, (lambda: source.sent().items()) if merged else None)
    if isinstance(source, MappingSource) and groups:
        names = source.sent().keys()
        results = {name for group in groups for name in group.results}
        sources = {name for group in groups for name in group.sources}
        if not names & (sources - results) and names & (results - sources):  # checkpoint names, some known here as well
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
        return converted(PeftSource(weights) if is_peft(weights) else ModuleSource(weights), weights)
    if is_mapping(weights) or is_tensordict_module(weights):
        return MappingSource(weights)
    if isinstance(weights, (str, os.PathLike)):
        return CheckpointSource(weights)
    raise ConfigError(
        f"a {type(weights).__name__} holds no weights that can be sent",
        expected="an nn.Module, a TensorDict, a mapping of tensors, a checkpoint directory or a WeightSource",
    )
