"""The tensors that a model computes with: all that can be reached from its modules, whatever keeps them.

Engines derive tensors from the weights that they load: packed and shuffled copies, absorbed products, scales. They keep
them as parameters, as attributes of a module, of its quantisation method or kernel, or in the closure of the function
that multiplies. A rehearsal (`torchrl_ext.engines.rehearsal`) shows whether a second load makes of all of them what the
first one did; this module finds them.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["DIFFERING", "OBJECTS", "TABLES", "Reading", "is_table", "is_varied", "reachable", "sample"]

# Conventions by which a rehearsal judges where no engine promises anything. Each may be wrong for an engine that nobody
# has tried. Beside these, a derived tensor of one dimension may stay as it was, and so may a parameter or buffer in
# which no checkpoint tensor lands.

OBJECTS = 100_000
"""Objects below one module in which tensors are looked for; numbers and strings do not count. With more the module is
unproven."""

REQUESTS = frozenset({"kv_cache", "kv_caches", "forward_context", "static_forward_context"})
"""Attributes, by their full names, in which engines keep the state of requests, or the layers of other models; no load
writes to them."""

TABLES = (
    *("cos", "sin", "rope", "rotary", "freq", "alibi", "mask"),
    *("workspace", "buffer", "cache", "lora", "embeds", "input_", "state"),
)
"""Words in names of tensors that kernels compute by themselves, or keep for requests, and that no load brings."""

SAMPLE, DISTINCT = 512, 16
"""A tensor of integers, or with fewer distinct values among a sample, may stay as it was."""

DIFFERING = 0.9
"""Share of a layer's outputs that a new weight changes; a few may be equal by chance."""


def is_table(path: str) -> bool:
    """Return whether a name has one of `TABLES`."""
    return any(word in path.lower() for word in TABLES)


def is_varied(tensor: Tensor) -> bool:
    """Return whether a tensor is of floats with at least `DISTINCT` values among `SAMPLE`."""
    return tensor.is_floating_point() and sample(tensor).numel() >= DISTINCT


def sample(tensor: Tensor) -> Tensor:
    """Return some of a tensor's values in float32, each once, sorted."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)].float().unique()


_OWN = frozenset(vars(nn.Module()))
_FOREIGN = ("torch", "numpy", "builtins", "collections", "logging", "threading", "transformers")
_PLAIN = (*weakref.ProxyTypes, str, bytes, int, float, type(None))


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One tensor that a layer computes with.

    Attributes:
        layer: path of the module that it was reached from; "" is the model itself.
        name: of the tensor below that module; ``"weight"``, ``"quant_method.moe_kernel.scale"``; "" is the module.
        tensor: the live tensor, or what the layer answers a fixed input where its weights cannot be read.
        derived: it is neither a parameter nor a buffer of its module.
        of: where it is an answer, shape (inputs, outputs): the parameter whose rows, one per output, made it.
        unsearched: more than `OBJECTS` lie below the module, and not all were searched; ``tensor`` is empty then.
    """

    layer: str
    name: str
    tensor: Tensor
    derived: bool = False
    of: str = ""
    unsearched: bool = False

    @property
    def key(self) -> str:
        """The name within the model."""
        return ".".join(filter(None, (self.layer, self.name)))


def reachable(model: nn.Module) -> Iterator[Reading]:
    """Yield every tensor that can be reached from the modules of a model, and one reading of each with too many parts.

    Parameters and buffers come under each of their names. Other tensors come once, from the nearest module: below
    attributes, kernels, containers, closures, and the entries of dictionaries whose keys are strings or integers.
    Tensors without data (on the meta device, or empty) and those of `REQUESTS` do not come.
    """
    modules = dict(model.named_modules())
    seen: set[Any] = {id(module) for module in modules.values()}  # and the places of tensors
    ahead: deque[tuple[str, str, Any]] = deque()
    for layer, module in modules.items():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if name not in REQUESTS and tensor is not None and _holds_data(tensor):
                _is_new(tensor, seen)
                yield Reading(layer=layer, name=name, tensor=tensor)
        ahead.extend((layer, name, value) for name, value in vars(module).items() if name not in _OWN)
    met: Counter[str] = Counter()
    while ahead:
        layer, path, value = ahead.popleft()
        if issubclass(type(value), _PLAIN) or id(value) in seen:
            continue
        if path.rpartition(".")[2] in REQUESTS:
            continue
        if isinstance(value, Tensor):
            if _is_new(value, seen):
                yield Reading(layer=layer, name=path, tensor=value, derived=True)
        else:
            seen.add(id(value))
            for name, part in _parts(value):
                if issubclass(type(part), _PLAIN):
                    continue
                met[layer] += 1
                if met[layer] <= OBJECTS:
                    ahead.append((layer, f"{path}.{name}", part))
                elif met[layer] == OBJECTS + 1:
                    yield Reading(layer=layer, name="", tensor=torch.empty(0), unsearched=True)


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the objects that ``value`` consists of, by name, if there can be tensors among them."""
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return enumerate(list(value))
    if isinstance(value, dict):
        return [(key, part) for key, part in list(value.items()) if isinstance(key, (str, int))]
    if isinstance(value, functools.partial):
        return [*enumerate(value.args), *value.keywords.items(), ("func", value.func)]
    if isinstance(value, types.MethodType):
        return [("self", value.__self__), ("func", value.__func__)]
    if isinstance(value, types.FunctionType):
        closed = zip(value.__code__.co_freevars, map(_content, value.__closure__ or ()), strict=True)
        defaults = [*enumerate(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()]
        return [*closed, *defaults, *vars(value).items()]
    if isinstance(value, nn.Module):  # one that no other module has registered
        own = [(name, part) for name, part in vars(value).items() if name not in _OWN]
        return [*value._parameters.items(), *value._buffers.items(), *value._modules.items(), *own]
    if isinstance(value, (type, types.ModuleType)) or type(value).__module__.split(".")[0] in _FOREIGN:
        return []
    return [*getattr(value, "__dict__", {}).items(), *_slots(value)]


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items() if "__slots__" in vars(kind) else ():
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    yield name, slot.__get__(value)
                except AttributeError:  # not filled yet
                    continue


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _holds_data(tensor: Tensor) -> bool:
    return tensor.device.type != "meta" and tensor.numel() > 0


def _is_new(tensor: Tensor, seen: set[Any]) -> bool:
    """Note the place of a tensor, and return whether it holds data that was not met before."""
    if not _holds_data(tensor) or (tensor.dtype is torch.int64 and tensor.numel() == 1):  # an address or a counter
        return False
    try:
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    except RuntimeError:  # a tensor subclass without memory of its own
        return False
    known = place in seen
    seen.add(place)
    return not known
