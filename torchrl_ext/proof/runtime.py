"""The tensors that a model computes with: all that can be reached from its modules, whatever keeps them.

Engines derive tensors from the weights that they load: packed and shuffled copies, absorbed products, scales. They keep
them as parameters, as attributes of a module, of its quantisation method or kernel, or in the closure of the function
that multiplies. A rehearsal (`torchrl_ext.proof.rehearsal`) shows whether a second load makes of all of them what the
first one did; this module finds them.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Reading", "reachable"]

_DEPTH = 5
_ENTRIES = 4096  # of one container
_OWN = frozenset(vars(nn.Module()))
_FOREIGN = ("torch", "numpy", "builtins", "collections", "logging", "threading", "transformers")
_NOT_WEIGHTS = ("kv_cache", "config", "weight_loader", "handler_tensor", "forward_context", "parent")
"""Parts of names under which modules keep what no load writes: requests' keys and values, settings, addresses."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One tensor that a layer computes with.

    Attributes:
        layer: path of the module that it was reached from; "" is the model itself.
        name: of the tensor below that module; ``"weight"``, ``"quant_method.moe_kernel.scale"``.
        tensor: the live tensor, or what the layer answers a fixed input where its weights cannot be read.
        derived: it is neither a parameter nor a buffer of its module.
        of: where it is an answer, shape (inputs, outputs): the parameter whose rows, one per output, made it.
    """

    layer: str
    name: str
    tensor: Tensor
    derived: bool = False
    of: str = ""

    @property
    def key(self) -> str:
        """The name within the model."""
        return f"{self.layer}.{self.name}" if self.layer else self.name


def reachable(model: nn.Module, cuts: set[str] | None = None) -> Iterator[Reading]:
    """Yield every tensor that can be reached from the modules of a model.

    Parameters and buffers come under each of their names; what is none of these, and lies below attributes, kernels,
    containers and closures, comes once. Left out are keys and values of requests, settings, and tensors without data
    (the meta device, no elements).

    Args:
        model: the model.
        cuts: takes the paths below which tensors may lie that are not followed: deeper than 5 steps, after the first
            4,096 entries of a container, or in an object without a ``__dict__``.
    """
    cuts = set() if cuts is None else cuts
    seen: set[Any] = set()
    modules = list(model.named_modules())
    for layer, module in modules:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and "kv_cache" not in name and _holds_data(tensor):
                _is_new(tensor, seen)
                yield Reading(layer=layer, name=name, tensor=tensor)
    seen.update(id(module) for _, module in modules)
    for layer, module in modules:
        for name, value in list(vars(module).items()):
            if name not in _OWN:
                for path, tensor in _below(name, value, seen, _DEPTH, (layer, cuts)):
                    yield Reading(layer=layer, name=path, tensor=tensor, derived=True)


def _below(
    path: str, value: Any, seen: set[Any], depth: int, cut: tuple[str, set[str]]
) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if _is_new(value, seen):
            yield path, value
        return
    if id(value) in seen or any(part in path.rpartition(".")[2] for part in _NOT_WEIGHTS):
        return
    parts = _parts(value)
    slotted = not parts and not _foreign(value) and bool(getattr(type(value), "__slots__", ()))
    longer = isinstance(value, (list, tuple, dict)) and len(value) > _ENTRIES
    if slotted or longer or (depth == 0 and parts):
        cut[1].add(f"{cut[0]}.{path}" if cut[0] else path)
    for name, part in parts if depth else ():
        seen.add(id(value))
        yield from _below(f"{path}.{name}", part, seen, depth - 1, cut)


def _parts(value: Any) -> list[tuple[Any, Any]]:
    """Return what ``value`` is made of, by name, where tensors may be among it."""
    if isinstance(value, (list, tuple)):
        return list(enumerate(value[:_ENTRIES]))
    if isinstance(value, dict):
        return [(key, part) for key, part in list(value.items())[:_ENTRIES] if isinstance(key, (str, int))]
    if isinstance(value, functools.partial):
        return [*enumerate(value.args), *value.keywords.items(), ("func", value.func)]
    if isinstance(value, types.MethodType):
        return [("self", value.__self__)]
    if isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        names = value.__code__.co_freevars
        return [
            *((name, _content(cell)) for name, cell in zip(names, cells, strict=True)),
            *enumerate(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).items(),
        ]
    if isinstance(value, nn.Module):  # one that no other module has registered
        own = [(name, part) for name, part in vars(value).items() if name not in _OWN]
        return [*value._parameters.items(), *value._buffers.items(), *value._modules.items(), *own]
    if _foreign(value):
        return []
    return [(name, part) for name, part in getattr(value, "__dict__", {}).items() if name not in _OWN]


def _foreign(value: Any) -> bool:
    return isinstance(value, (type, types.ModuleType)) or type(value).__module__.split(".")[0] in _FOREIGN


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _holds_data(tensor: Tensor) -> bool:
    return tensor.device.type != "meta" and tensor.numel() > 0


def _is_new(tensor: Tensor, seen: set[Any]) -> bool:
    """Return whether a tensor holds data that was not met before."""
    if not _holds_data(tensor):
        return False
    try:
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    except RuntimeError:  # a tensor subclass without memory of its own
        return False
    if tensor.dtype is torch.int64 and tensor.dim() == 0:  # an address or a counter
        return False
    known = place in seen
    seen.add(place)
    return not known
