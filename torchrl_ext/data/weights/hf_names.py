"""Checkpoint names for `transformers` modules, which hold some weights stacked, or under names of their own.

Since version 5 the experts of a mixture are one tensor of the module (``mlp.experts.gate_up_proj``), and lie one by one
in its checkpoint (``mlp.experts.0.gate_proj.weight``, ...), which is what engines read. ``save_pretrained`` undoes that
with ``revert_weight_conversion``. The same function runs here over tensors without data, once for each structure of a
module: the memory of what comes out says which part of which tensor of the module each checkpoint tensor is.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, partial, reduce
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from torchrl_ext.base.errors import ManifestError
from torchrl_ext.base.types import ParamMeta, cast_hint
from torchrl_ext.data.weights.blocks import Shard
from torchrl_ext.data.weights.shared import shared
from torchrl_ext.data.weights.source import is_distributed, named_tensors, same_memory, unwrapped
from torchrl_ext.data.weights.view import View, Walk, has_each_once

__all__ = ["SameWeights", "Spelling", "groups_of", "shards_of_part"]

log = logging.getLogger("torchrl_ext")

PEFT = "base_model.model."


def _unknown(name: str, known: Iterable[str]) -> ManifestError:
    """Return the error for a parameter that the model does not have; it suggests the nearest name that it has."""
    names = sorted(known)
    near = [other for other in names if name.endswith(f".{other}") or other.endswith(f".{name}")]
    near = near or get_close_matches(name, names, 1)
    return ManifestError(
        f"the model has no parameter {name!r}",
        expected=f"a name that it has, such as {near[0]!r}" if near else None,
        state="nothing was changed",
        hint="give WeightSender a mapper=, which takes each name and returns the engine's; for a parametrized module, "
        "send a mapping with the products",
    )


def shards_of_part(meta: ParamMeta, walk: Walk, shards: Iterable[Shard]) -> Iterator[Shard]:
    """Yield what shards of a module's tensor hold of a checkpoint tensor that is a part of it, as views.

    Args:
        meta: the checkpoint tensor.
        walk: a straight one through the module's tensor: that part.
        shards: of the module's tensor.
    """
    for shard in shards:
        found = walk.restrict(shard.block)
        if found is not None:
            block, own = found
            yield Shard(meta, block, partial(_taken, own, shard), shard.gathers, shard.why)


def _taken(walk: Walk, shard: Shard) -> Tensor:
    return walk.of(shard.take(), shard.block)


@dataclass(frozen=True, kw_only=True, eq=False)
class SameWeights:
    """Tensors of a module that become checkpoint tensors together.

    Attributes:
        sources: name in the module -> its shape and strides there, at offset 0.
        results: name in the checkpoint -> view of the source; undefined where ``copied``, but for its sizes.
        copied: the checkpoint tensors are made by a copy (q, k and v in one, say), and are not parts of one source.
        revert: makes the checkpoint tensors, in order, from full tensors of the module, by name.
    """

    sources: Mapping[str, View]
    results: Mapping[str, View]
    copied: bool
    revert: Callable[[Mapping[str, Tensor]], Iterable[Tensor]]

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether ``tensors`` has every source, in its shape."""
        return all(name in tensors and tuple(tensors[name].shape) == view.sizes for name, view in self.sources.items())

    def params(self, tensors: Mapping[str, Tensor]) -> tuple[ParamMeta, ...]:
        """Return what `undo` would give, for sources that may be parts of larger tensors, or have no data."""
        dtype = reduce(torch.promote_types, (tensors[name].dtype for name in self.sources))
        return tuple(ParamMeta(name, dtype, view.sizes) for name, view in self.results.items())

    def parts(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the checkpoint tensors as views of their source; none where a copy makes them."""
        ((name, view), *_) = self.sources.items()
        if self.copied or tensors[name].stride() != view.strides:
            return {}
        return {part: view.of(tensors[name]) for part, view in self.results.items()}

    @cached_property
    def walks(self) -> list[Walk]:
        """The straight walks through the only source to the results, in order; empty where one of them has none."""
        if self.copied:
            return []
        (source,) = self.sources.values()
        walks = [view.walk(source.sizes, source.strides) for view in self.results.values()]
        found = [walk for walk in walks if walk is not None and walk.straight]
        return found if len(found) == len(walks) else []

    @torch.no_grad()
    def undo(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the checkpoint tensors, made from full tensors of the module."""
        if self.copied:
            return dict(zip(self.results, self.revert({name: tensors[name] for name in self.sources}), strict=True))
        ((name, view),) = self.sources.items()
        return self.parts(tensors) or self.parts({name: _with_strides(tensors[name], view.strides)})


def _with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def groups_of(
    module: nn.Module, tensors: Callable[[], Iterable[tuple[str, Tensor]]] | None = None
) -> tuple[SameWeights, ...]:
    """Return the groups of tensors of ``module`` that have other names or another layout in its checkpoint.

    Args:
        module: any; only `transformers` models in it have such tensors.
        tensors: lists those of the module, by name, where there may be such; default: all of them. Only shapes, strides
            and dtypes are looked at.
    """
    if "transformers.modeling_utils" not in sys.modules:  # then nobody can have made a model
        return ()
    from transformers import PreTrainedModel

    def models(path: str, part: nn.Module) -> Iterator[tuple[str, _Known]]:
        if not isinstance(part, PreTrainedModel):
            for name, child in part.named_children():
                yield from models(f"{path}{name}.", child)
        elif (known := _known(part)).converts:
            yield unwrapped(path).replace(PEFT, ""), known

    found = [*models("", module)]
    own = [*(named_tensors(module, scratch=True) if tensors is None else tensors())] if found else []
    return tuple(group for prefix, known in found for group in known.groups(prefix, own))


class _Known:
    """The groups of a model, kept until other conversions are noted on it."""

    def __init__(self, model: Any, noted: Any) -> None:
        self.noted = noted
        self.converts = _has_conversions(model) if noted is None else bool(noted)
        self._model = weakref.ref(model)
        self._plans: dict[Any, tuple[SameWeights, ...]] = {}

    def groups(self, prefix: str, tensors: Iterable[tuple[str, Tensor]]) -> tuple[SameWeights, ...]:
        own = [(name, tensor) for name, tensor in tensors if name.startswith(prefix)]
        key = (prefix, tuple((name, tuple(tensor.shape), tensor.stride()) for name, tensor in own))
        if key not in self._plans:
            if len(self._plans) > 3:
                self._plans.clear()
            self._plans[key] = self._plan(prefix, own)
        return self._plans[key]

    def _plan(self, prefix: str, tensors: Iterable[tuple[str, Tensor]]) -> tuple[SameWeights, ...]:
        empty = {name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for name, t in tensors}
        trace = _Trace()
        try:
            with torch.no_grad(), trace:
                made = self._reverted(prefix, empty)
            return tuple(
                SameWeights(
                    sources={name: View.seen(empty[name]) for name in sources},
                    results={name: View.seen(made[name]) for name in results},
                    copied=copied,
                    revert=lambda given: self._reverted(prefix, given).values(),
                )
                for sources, results, copied in trace.groups(empty, made)
            )
        except (ValueError, TypeError, AttributeError, LookupError, RuntimeError) as error:  # a quantized model, say
            log.warning(
                "weights are sent under the module's names, because transformers cannot undo its conversion: %s", error
            )
            return ()

    def _reverted(self, prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        given = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        made = revert_weight_conversion(_plain(self._model()), given)
        return {prefix + name: tensor for name, tensor in made.items()}


_KNOWN: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


def _known(model: Any) -> _Known:
    found, noted = _KNOWN.get(model), getattr(model, "_weight_conversions", None)  # None where nothing was loaded
    if found is None or found.noted is not noted:
        found = _KNOWN[model] = _Known(model, noted)
    return found


def _has_conversions(model: Any) -> bool:
    if getattr(sys.modules.get("transformers.core_model_loading"), "revert_weight_conversion", None) is None:
        return False  # before version 5 modules have the names of their checkpoints
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(_plain(model), add_legacy=False))


@final
class _Trace(TorchFunctionMode):
    """Records which tensors are made from one another.

    ``contiguous`` does nothing meanwhile: what it would copy stays a view, and so says where it lies in its source.
    """

    def __init__(self) -> None:
        super().__init__()
        self._joined = dict[int, set[int]]()  # by memory
        self._kept = list[Tensor]()  # so that no other tensor gets the address of their memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.contiguous:
            return args[0]
        made = func(*args, **(kwargs or {}))
        together = [leaf for leaf in tree_leaves((args, kwargs, made)) if isinstance(leaf, Tensor)]
        memories = {_memory(tensor) for tensor in together}
        if not memories <= self._joined.keys() or len(memories) > 1:
            self._kept += together
            union = set[int]().union(*(self._joined.get(memory, {memory}) for memory in memories))
            self._joined |= dict.fromkeys(union, union)
        return made

    def groups(
        self, sources: Mapping[str, Tensor], made: Mapping[str, Tensor]
    ) -> Iterator[tuple[list[str], list[str], bool]]:
        """Yield sources and results that belong together, and whether a copy made these; unchanged ones are left out.

        Args:
            sources, made: by name.
        """
        together = dict[int, tuple[list[str], list[str]]]()
        for index, tensors in enumerate((sources, made)):
            for name, tensor in tensors.items():
                union = self._joined.setdefault(_memory(tensor), {_memory(tensor)})
                together.setdefault(id(union), ([], []))[index].append(name)
        given = {_memory(tensor) for tensor in sources.values()}
        for own, results in together.values():
            copied = len(own) > 1 or any(_memory(made[name]) not in given for name in results)
            if results and (copied or own != results or View.seen(made[own[0]]) != View.seen(sources[own[0]])):
                yield own, results, copied


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _plain(model: Any) -> Any:
    """Return the model with its classes before ``fully_shard``: conversions are found by the class's name."""

    def original(part: nn.Module) -> type:
        bases = type(part).__mro__
        return next((after for base, after in pairwise(bases) if base.__name__ == "FSDPModule"), bases[0])

    def twin(part: nn.Module) -> nn.Module:
        made: nn.Module = object.__new__(original(part))
        children = {name: child if child is None else twin(child) for name, child in part._modules.items()}
        made.__dict__.update(part.__dict__, _modules=children)
        return made

    return twin(model) if any(original(part) is not type(part) for part in model.modules()) else model


@final
class Spelling:
    """The tensors of a module or a mapping under the names of an update: of each group its own, or the checkpoint's.

    Args:
        own: every live tensor under each of its own names.
        groups: how some of them become checkpoint tensors.
        sent: the names of the update; None: those of the checkpoint.

    Attributes:
        places: name -> live tensor, detached, or a view of one that is a part of it.
        source_of: name in ``places`` -> name of the live tensor that it is, or is a part of.
    """

    def __init__(
        self, own: Mapping[str, Tensor], groups: Iterable[SameWeights], sent: frozenset[str] | None = None
    ) -> None:
        self._own, self._made_of = own, _what_matters(own, groups, sent)
        self._made = {name: group for group in groups if group.copied for name in group.results}
        groups = [group for group in groups if not group.copied]
        sources = {name for group in groups for name in group.sources}
        results = {name for group in groups for name in group.results}
        self._checkpoint = sent is None or sent <= (own.keys() - sources) | results
        if sent is not None and not self._checkpoint:
            groups = [group for group in groups if sent.isdisjoint(group.sources)]
        self._group_of = {name: group for group in groups for name in group.sources}
        self.places: dict[str, Tensor] = {}
        self.source_of: dict[str, str] = {}
        for name, tensor in own.items():
            group, live = self._group_of.get(name), tensor.detach()
            places = {name: live} if group is None else group.parts({name: live})
            self.places |= places
            self.source_of |= dict.fromkeys(places, name)

    def is_of(self, own: Mapping[str, Tensor], groups: Iterable[SameWeights], sent: frozenset[str] | None) -> bool:
        """Return whether these arguments would make the same."""
        return self._made_of == _what_matters(own, groups, sent)

    def check(self, params: Iterable[ParamMeta], needed: Mapping[str, Tensor], *, asleep: bool = False) -> None:
        """Refuse an update that cannot land.

        Args:
            params: the update.
            needed: live tensors that have to come, by name; tied ones under any of their names.
            asleep: the memory of the live tensors was released, and comes back before the update does.

        Raises:
            ManifestError: names a parameter that is unknown, missing, given twice, or of another shape or dtype.
        """
        known, params = {name: ParamMeta.of(name, place) for name, place in self.places.items()}, tuple(params)
        self.require(meta.name for meta in params)
        for meta in params:
            own, place = known[meta.name], self.places[meta.name]
            why, hint = "", "clone() it in the engine's model"
            if is_distributed(place):
                why, hint = "it is sharded", "update a model whose tensors are whole"
            elif place.is_meta:
                why = "it is on the meta device"
                hint = 'call model.to_empty(device="cpu"), or another device, before the engine joins'
            elif not asleep and not has_each_once(place):
                why = "some of its elements share memory"
            if why:
                raise ManifestError(
                    f"parameter {meta.name!r} of the model cannot be written: {why}",
                    expected="a tensor with memory for each element",
                    state="nothing was changed",
                    hint=hint,
                )
            if own != meta:
                raise ManifestError(
                    f"parameter {meta.name!r} arrives as {meta.form}",
                    expected=own.form,
                    state="nothing was changed",
                    hint=cast_hint((one.name, known[one.name].dtype) for one in params if one.name in known)
                    if own.shape == meta.shape
                    else "start the engine from the trainer's checkpoint",
                )
        given = {meta.name for meta in params}
        absent = {}  # live tensors that do not come whole -> a name that is missing
        for name in self._own:
            group = self._group_of.get(name)
            left = next((one for one in ((name,) if group is None else group.results) if one not in given), None)
            if left is not None:
                absent[name] = left if self._checkpoint else name
        missing = {same_memory(tensor): name for name, tensor in reversed([*needed.items()])}
        for name, tensor in self._own.items():
            if name not in absent:
                missing.pop(same_memory(tensor), None)
        if missing:
            raise ManifestError(
                f"{len(missing)} parameters of the model are missing from the update, "
                f"first {min(absent[name] for name in missing.values())!r}",
                state="nothing was changed",
                hint="register the whole model, or name a part with only=",
            )

    def shared(self, names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
        """Return which of these names land in one memory."""
        found = list[tuple[Any, str]]()
        for name in names:
            if (place := self.places.get(name)) is not None and place.numel():
                found.append(((_memory(place), View.seen(place), place.dtype), name))
        return shared(found)

    def require(self, names: Iterable[str]) -> None:
        """Refuse names that the model does not take.

        Raises:
            ManifestError: names the first.
        """
        for name in names:
            if (group := self._made.get(name)) is not None and name not in self.places:
                raise ManifestError(
                    f"{name!r} is made of several tensors of the model, or of their elements in another order",
                    expected=", ".join(group.sources),
                    state="nothing was changed",
                    hint="send module.state_dict() by a sender without a registered model",
                )
            if name not in self.places:
                raise _unknown(name, self.places)


def _what_matters(
    own: Mapping[str, Tensor], groups: Iterable[SameWeights], sent: frozenset[str] | None
) -> tuple[Any, ...]:
    return sent, tuple(groups), [(name, same_memory(tensor)) for name, tensor in own.items()]
