"""Sources of weights: all tensors of a trainer, as one re-iterable stream of `(name, tensor)`.

The contract is small: `params` lists the tensors that iteration yields, in the same order, without moving a byte; each
iteration is a fresh pass over the current values and yields full (gathered) tensors one at a time. `checked` compares
the two, so that a disagreement raises an error with a name instead of a hang.
"""

from __future__ import annotations

import json
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, starmap
from typing import Any, final

import torch
from torch import Tensor, nn

from torchrl_ext.base.errors import ManifestError
from torchrl_ext.base.types import ParamMeta, Part, dtype_name, is_torchrl
from torchrl_ext.data.weights.blocks import Block, Shard, shards_of_dtensor
from torchrl_ext.data.weights.digests import fetched

__all__ = ["FiniteCheck", "MappingSource", "ModuleSource", "WeightSource", "checked", "inner_model"]

_CAST = 1 << 20  # elements
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_PLAIN = frozenset({Tensor, nn.Parameter})


class WeightSource(ABC):
    """A re-iterable stream of full tensors in checkpoint coordinates.

    Ranks that share a parameter must iterate in lockstep, since gathering is a collective.

    Example:
        >>> source = tx.as_source(policy)
        >>> [(meta.name, meta.shape) for meta in source.params()]
        [('weight', (2, 4)), ('bias', (2,))]
        >>> [name for name, tensor in source]
        ['weight', 'bias']

    Attributes:
        part: for a source of some tensors, the version that has the others; for a source of all tensors, those that may
            have changed since that version; None if any may have changed.
    """

    part: Part | None = None

    @abstractmethod
    def params(self) -> tuple[ParamMeta, ...]:
        """Describe the tensors that iteration yields, in order; never gathers."""

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Begin a fresh pass: each tensor is full (not sharded), detached, and as it is now."""

    def pairs(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Begin a pass over the tensors of these names, the same on every rank; by default over all tensors."""
        for name, tensor in self:
            if name in names:
                yield name, tensor

    def held(self) -> Mapping[str, Tensor]:
        """Return the tensors, if any, that every pass yields without a gather, a cast or a copy."""
        return {}

    def shards(self) -> Iterator[Shard]:
        """Yield the blocks that this rank holds, in the order of `params`, without a gather.

        A rank may hold no block of a parameter, or several; all ranks together hold every element, some more than once.
        Shards that gather must be taken in order, each once. By default each shard is a whole tensor from a pass over
        the source.
        """
        stream = (tensor for _, tensor in checked(self))
        yield from gathered_in_order(self.params(), stream, "its source makes it as a whole")

    def replay(self) -> None:
        """Take part in every gather of one pass and drop the tensors: the role of ranks that do not drive."""
        for _ in self:
            pass

    def drain(self) -> None:  # noqa: B027 - only a pass that is kept can be finished
        """Finish a pass that stopped early, so that other ranks do not wait in its gathers."""

    def tied(self) -> Mapping[str, str]:
        """Return the names of tied tensors that are not sent -> the name of the tensor that is sent for them."""
        return {}

    def files(self) -> Mapping[str, bytes]:
        """Return the files that complete a checkpoint (``config.json``, tokenizer files): name -> content."""
        return {}


def gathered_in_order(params: Sequence[ParamMeta], stream: Iterator[Tensor], why: str) -> Iterator[Shard]:
    """Yield a whole-tensor shard for each of ``params``, whose `take` reads the next tensor of a stream.

    Args:
        params: the tensors that the stream yields, in order.
        stream: the tensors; it starts with the first `take`, which raises ManifestError when it is called out of order.
        why: why the tensors are gathered.
    """
    taken = count()

    def take(index: int, meta: ParamMeta) -> Tensor:
        if next(taken) != index:
            raise ManifestError(
                f"the shard of {meta.name!r} was taken out of order",
                expected="`Shard.take` of every shard that gathers, once each, in order",
                state="nothing was read of it",
            )
        tensor = next(stream)
        if index + 1 == len(params):
            next(stream, None)  # lets the source say that it has more than it declared
        return tensor

    for index, meta in enumerate(params):
        yield Shard(meta, Block.whole(meta.shape), partial(take, index, meta), gathers=True, why=why)


def checked(
    source: WeightSource | Iterator[tuple[str, Tensor]], params: Iterable[ParamMeta] | None = None
) -> Iterator[tuple[ParamMeta, Tensor]]:
    """Yield one pass over ``source``, compared with ``params`` element by element.

    Args:
        source: a source, or a pass over one that has just begun.
        params: default: those of the source itself.

    Yields:
        `(meta, tensor)` pairs.

    Raises:
        ManifestError: a parameter is missing or extra, or its name, dtype or shape differs; the message names the first
            one.
    """
    stream = iter(source)
    for index, meta in enumerate(source.params() if params is None else params):  # type: ignore[union-attr]
        pair = next(stream, None)
        if pair is None:
            raise ManifestError(
                f"the source ended before parameter {index}, {meta.name!r}", expected=str(meta), hint=_HINT
            )
        name, tensor = pair
        if name != meta.name or tensor.dtype != meta.dtype or tensor.shape != meta.shape:
            found = ParamMeta.of(name, tensor)
            raise ManifestError(f"parameter {index} of the source is {found}", expected=str(meta), hint=_HINT)
        yield meta, tensor
    extra = next(stream, None)
    if extra is not None:
        raise ManifestError(f"the source yields {extra[0]!r} after its last declared parameter", hint=_HINT)


_HINT = "`params()` and iteration of a WeightSource must agree in order, names, dtypes and shapes"


def is_distributed(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor: a part of a larger one."""
    if type(tensor) in _PLAIN or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def require_memory(name: str, tensor: Tensor) -> None:
    """Refuse a tensor whose values no memory holds, at one place for each element, or not on this rank.

    Raises:
        ManifestError: names it, and says what to send in its place.
    """
    kind = type(tensor)
    dense = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
    if is_distributed(tensor) or (kind in _PLAIN and dense and tensor.numel() and tensor.element_size() <= 8):
        return
    if nn.parameter.is_lazy(tensor):
        found, hint = "a lazy parameter, whose shape is not known yet", "run its module once"
    elif not dense:
        found, hint = f"a {kind.__name__} of {tensor.layout}, {tensor.dtype}".replace("torch.", ""), "make it dense"
    elif kind not in _PLAIN and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        found, hint = f"a {kind.__name__}, which makes its values of other tensors", "send plain tensors"
    elif tensor.element_size() > 8:
        found, hint = f"a tensor of {tensor.dtype}".replace("torch.", ""), "send view_as_real of it"
    elif getattr(tensor, "ds_numel", False) and not tensor.numel():
        found = "an empty placeholder of DeepSpeed's ZeRO-3"
        hint = "gather them (GatheredParameters) on every rank while the weights are sent"
    else:
        return
    raise ManifestError(
        f"{name!r} is {found}", expected="a tensor whose memory holds its values", state="nothing was sent", hint=hint
    )


@final
class FiniteCheck:
    """Refuses tensors with a NaN or an infinity: on the host at once, on an accelerator when `settle` waits for it."""

    def __init__(self) -> None:
        self._found = list[tuple[str, Tensor]]()

    def add(self, name: str, tensor: Tensor) -> None:
        """Look at a tensor, which is not held.

        Raises:
            ManifestError: names it, on the host.
        """
        if not tensor.is_floating_point() or not tensor.numel() or "float4" in str(tensor.dtype):  # which has neither
            return
        found = _is_finite(tensor.detach())
        if not found.is_cpu:
            self._found.append((name, found))
        elif not found:
            raise _infinite(name)

    def settle(self) -> None:
        """Wait, once for each accelerator, for what was found since the last call.

        Raises:
            ManifestError: names the first tensor with one.
        """
        pending, self._found = self._found, []
        for (name, _), finite in zip(pending, fetched([found for _, found in pending]), strict=True):
            if not finite:
                raise _infinite(name)


def _is_finite(tensor: Tensor) -> Tensor:
    """Return whether all elements are finite: bool, shape (1,), on their device; does not wait for it."""
    small = tensor.element_size() == 1  # without sums and comparisons, so that it is cast, a part at a time
    if tensor.is_cpu and not small and math.isfinite(tensor.sum().item()):  # faster; a sum of finite ones may overflow
        return torch.tensor([True])
    parts = tensor.reshape(-1).split(_CAST) if small else [tensor]
    ends = [torch.aminmax(part.float() if small else part) for part in parts]  # a NaN anywhere is both
    return torch.stack([end for both in ends for end in both]).isfinite().all(0, keepdim=True)


def _infinite(name: str) -> ManifestError:
    return ManifestError(
        f"there is a NaN or an infinity in {name!r}",
        expected="finite weights",
        hint="find what makes the weights non-finite in training, or send them anyway with finite=False",
    )


def _made(tensor: Tensor) -> bool:
    """Return whether `full` makes another tensor."""
    return tensor.is_neg() or tensor.is_conj() or is_distributed(tensor)


def full(tensor: Tensor) -> Tensor:
    """Return the whole tensor: a DTensor is gathered (a collective over its mesh), a lazy conjugate or negative is
    computed, anything else only detached."""
    if not _made(tensor):
        return tensor.detach()
    with torch.no_grad():
        whole: Tensor = tensor.full_tensor() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]
        whole = whole.resolve_conj().resolve_neg()
    return whole.detach()  # not before: of an unusual order of splits torch 2.13 forgets it to detach a DTensor


def same_memory(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that tied tensors share: same bytes, shape, strides and values; valid while the tensors live.

    A DTensor is only itself: its local part may be empty on one rank and not on another, and all ranks must agree.
    """
    if is_distributed(tensor) or tensor.numel() == 0 or tensor.device.type == "meta":  # meta: no memory to share
        return (id(tensor),)
    lazy = tensor.is_conj(), tensor.is_neg()  # memory does not hold the values of these
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), lazy)


def live_shards(name: str, tensor: Tensor) -> Iterator[Shard]:
    """Yield what this rank holds of a live tensor: the block of a DTensor, or all of a plain tensor, as a replica."""
    meta = ParamMeta.of(name, tensor)
    if is_distributed(tensor):
        yield from shards_of_dtensor(meta, tensor, partial(full, tensor))
    elif meta.numel:
        yield Shard(meta, Block.whole(meta.shape), partial(_taken, name, tensor))


class LiveSource(WeightSource):
    """A source of live tensors, which may be taken in any order that is the same on all ranks.

    Tied tensors travel once, under the first of their names.
    """

    @abstractmethod
    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """List every name with its live tensor, which has the shape and dtype of the sent one; tied ones under each."""

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor of `sent` as it is sent: whole and detached.

        Raises:
            ManifestError: it has no data.
        """
        return _taken(name, tensor)

    def makes(self, name: str) -> str:
        """Return how `take` computes a tensor of the last `sent`; empty where it only gathers the live one."""
        return ""

    def sent(self) -> dict[str, Tensor]:
        """Return the live tensors that are sent, in order."""
        return self._listed()[0]

    def tied(self) -> Mapping[str, str]:
        return self._listed()[1]

    def _listed(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the tensors that are sent, and the names of others -> the name under which each is sent.

        Nothing here makes an object per tensor that lives on: ten thousand set off Python's collector in each update.
        """
        sent, tied = dict[str, Tensor](), dict[str, str]()
        firsts, others = dict[int, str](), dict[Any, str]()  # by address; and further views of the memory there
        for name, tensor in self.tensors():
            if name in sent or name in tied:
                raise ManifestError(f"two tensors are called {name!r}", hint="rename one of them")
            require_memory(name, tensor)
            first = firsts.setdefault((not is_distributed(tensor) and tensor.data_ptr()) or id(tensor), name)
            if first != name:
                key = self._key(name, tensor)
                first = first if key == self._key(first, sent[first]) else others.setdefault(key, name)
            if first == name:
                sent[name] = tensor
            else:
                tied[name] = first
        return sent, tied

    def _key(self, name: str, tensor: Tensor) -> tuple[Any, ...]:
        return same_memory(tensor)

    def params(self) -> tuple[ParamMeta, ...]:
        return tuple(starmap(ParamMeta.of, self.sent().items()))

    def pairs(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.sent().items():
            if names is None or name in names:
                yield name, self.take(name, tensor)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.pairs()

    def shards(self) -> Iterator[Shard]:
        for name, tensor in self.sent().items():
            yield from self.shards_of(name, tensor)

    def shards_of(self, name: str, tensor: Tensor) -> Iterator[Shard]:
        """Yield what this rank holds of a tensor of the last `sent`."""
        if why := self.makes(name):
            meta = ParamMeta.of(name, tensor)
            yield Shard(meta, Block.whole(meta.shape), partial(self.take, name, tensor), gathers=True, why=why)
        else:
            yield from live_shards(name, tensor)

    def held(self) -> Mapping[str, Tensor]:
        sent = self.sent()
        return {name: one.detach() for name, one in sent.items() if not _made(one) and not self.makes(name)}


def _taken(name: str, tensor: Tensor) -> Tensor:
    if tensor.device.type == "meta":
        raise ManifestError(
            f"{name!r} is on the meta device, which holds no data",
            hint="load the weights, or reload offloaded ones, before sending them",
        )
    return full(tensor)


class MappingSource(LiveSource):
    """A (nested) `TensorDict` or mapping of tensors; nested keys join with ``.``; sorted, so that order is canonical.

    Args:
        weights: TensorDict, or mapping of str or tuple-of-str keys to tensors or further mappings.

    Raises:
        ManifestError: a leaf is not a tensor, or two keys join to the same name.
    """

    def __init__(self, weights: Mapping[Any, Any]) -> None:
        self._weights = weights

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        return flatten(self._weights)

    def sent(self) -> dict[str, Tensor]:
        """Return tensors sorted by name, with ties resolved: a TensorDict of a module uses the module's names."""
        sent = super().sent()
        return {name: sent[name] for name in sorted(sent)}


def flatten(weights: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested mappings; keys join with ``.``.

    Raises:
        ManifestError: a leaf is not a tensor.
    """
    for key in weights.keys():  # noqa: SIM118 - iteration over a TensorDict is over its rows
        name = prefix + (key if type(key) is str else ".".join(key) if isinstance(key, tuple) else str(key))
        value = weights[key]
        if isinstance(value, Tensor):
            yield name, value
        elif is_mapping(value):
            yield from flatten(value, name + ".")
        else:
            raise ManifestError(f"{name!r} is a {type(value).__name__}", expected="a tensor")


def is_mapping(value: Any) -> bool:
    """Return whether ``value`` is a mapping or a TensorDict (asked without importing tensordict)."""
    if isinstance(value, Mapping):
        return True
    ours = any(base.__module__.startswith("tensordict.") for base in type(value).__mro__)
    return ours and not isinstance(value, nn.Module)


class ModuleSource(LiveSource):
    """Parameters, then persistent buffers, of a module, in registration order.

    DTensors (FSDP2, tensor parallel) are gathered one at a time. Names that `torch.compile` and activation
    checkpointing wrap into the path are unwrapped.

    Args:
        module: the live module; held by a strong reference (senders hold it weakly).
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        return named_tensors(self._module)

    def files(self) -> Mapping[str, bytes]:
        return model_files(self._module)


def model_files(module: nn.Module) -> Mapping[str, bytes]:
    """Return ``config.json`` (and ``generation_config.json``) of the `transformers` model in ``module``, else nothing.

    Never imports transformers. The fields that ``save_pretrained`` adds (``architectures``, ``dtype``) are added to
    what is written, not to the live config.
    """
    if "transformers" not in sys.modules:
        return {}
    from transformers import PreTrainedModel

    model = next((part for part in module.modules() if isinstance(part, PreTrainedModel)), None)
    if model is None:
        return {}
    config = json.loads(model.config.to_json_string())
    config["architectures"] = [type(model).__name__.removeprefix("FSDP")]  # fully_shard renames the class
    config["dtype"] = dtype_name(model.dtype)
    files = {"config.json": json.dumps(config, indent=2).encode() + b"\n"}
    if model.can_generate() and model.generation_config is not None:
        files["generation_config.json"] = model.generation_config.to_json_string().encode()
    return files


def named_tensors(module: nn.Module, *, scratch: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield live parameters, then persistent buffers, under unwrapped names; tied ones under each of their names.

    Args:
        module: the live module.
        scratch: also yield non-persistent buffers.
    """
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield unwrapped(name), parameter
    for path, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            if scratch or name not in part._non_persistent_buffers_set:
                yield unwrapped(f"{path}.{name}" if path else name), buffer


def unwrapped(name: str) -> str:
    """Return a name without the parts that `torch.compile` and activation checkpointing add."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def inner_model(model: Any) -> Any:
    """Return the model that an engine serves, without its wrappers.

    Wrappers are `DistributedDataParallel`, `torch.compile` and TorchRL's LLM wrappers (which put ``model.`` before its
    names), however they are stacked; anything else is returned as it is.
    """
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif type(model).__name__ == "OptimizedModule":  # its module is slow to import, and loaded by compile alone
            model = model._orig_mod
        elif is_torchrl(model, "LLMWrapperBase"):
            model = model.model
        else:
            return model


def is_tensordict_module(value: Any) -> bool:
    """Return whether ``value`` is a `TensorDictParams`: both a module and a TensorDict, as weights it is the latter."""
    return isinstance(value, nn.Module) and type(value).__name__ == "TensorDictParams"
