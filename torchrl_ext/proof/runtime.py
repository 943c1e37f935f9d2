"""The tensors that a model computes with: all that can be reached from its modules, whatever keeps them.

Engines derive tensors from the weights that they load: packed and shuffled copies, absorbed products, scales. They keep
them as parameters, as attributes of a module, of its quantisation method or kernel, or in the closure of the function
that multiplies. A rehearsal (`torchrl_ext.proof.rehearsal`) shows whether a second load makes of all of them what the
first one did; this module finds them.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_ext.proof.rules import DEPTH, ENTRIES, REQUESTS, SEARCHED, Applied, could_be_weights

__all__ = ["Reading", "reachable"]

_OWN = frozenset(vars(nn.Module()))
_FOREIGN = ("torch", "numpy", "builtins", "collections", "logging", "threading", "transformers")
_CONTAINERS = (list, tuple, set, frozenset, deque)
_PLAIN = (str, bytes, int, float, type(None))


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


def reachable(model: nn.Module, applied: set[Applied] | None = None) -> Iterator[Reading]:
    """Yield every tensor that can be reached from the modules of a model.

    Parameters and buffers come under each of their names. Other tensors come once: below attributes, kernels,
    containers and closures, at most `DEPTH` steps from a module and among the first `ENTRIES` objects in a container.
    Tensors without data (on the meta device, or empty) are left out.

    Args:
        model: the model.
        applied: receives the rules that left a tensor out. Behind a limit of the walk, only a place is named where a
            search of `SEARCHED` objects finds a tensor that could be made of weights, or does not come to an end.
    """
    applied = set() if applied is None else applied
    walk = _Walk(applied)
    modules = list(model.named_modules())
    for layer, module in modules:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or not _holds_data(tensor):
                continue
            if name in REQUESTS:
                applied.add(Applied("requests", layer, name))
                continue
            walk.is_new(tensor)
            yield Reading(layer=layer, name=name, tensor=tensor)
    walk.seen.update(id(module) for _, module in modules)
    for layer, module in modules:
        for name, value in list(vars(module).items()):
            if name not in _OWN:
                for path, tensor in walk.below(layer, name, value, DEPTH):
                    yield Reading(layer=layer, name=path, tensor=tensor, derived=True)
    walk.search()


class _Walk:
    """One pass over the objects that modules keep.

    Args:
        applied: as for `reachable`.

    Attributes:
        seen: identities of objects, and places of tensors, that need no second visit.
    """

    def __init__(self, applied: set[Applied]) -> None:
        self.seen: set[Any] = set()
        self._applied = applied
        self._left: list[tuple[Applied, list[tuple[str, Any]]]] = []  # what the limits left out, by name

    def below(self, layer: str, path: str, value: Any, depth: int) -> Iterator[tuple[str, Tensor]]:
        """Yield path and tensor of what ``value`` consists of, at most ``depth`` steps further."""
        if path.rpartition(".")[2] in REQUESTS:
            if value is not None:
                self._applied.add(Applied("requests", layer, path))
            return
        if isinstance(value, Tensor):
            if self.is_new(value):
                yield path, value
            return
        if id(value) in self.seen:
            return
        parts = _parts(value)
        if depth == 0:
            if found := [(f"{path}.{name}", part) for name, part in parts]:
                self._left.append((Applied("deep", layer, path), found))
            return
        first = list(islice(parts, ENTRIES))
        if rest := [(f"{path}.{name}", part) for name, part in parts]:
            self._left.append((Applied("long", layer, path), rest))
        for name, part in first:
            self.seen.add(id(value))
            yield from self.below(layer, f"{path}.{name}", part, depth - 1)

    def search(self) -> None:
        """Apply ``deep`` and ``long`` where tensors lie, or may lie, that the pass left out."""
        for rule, ahead in self._left:
            objects = deque(ahead)
            for _ in range(SEARCHED):
                if not objects:
                    break
                path, value = objects.popleft()
                if isinstance(value, Tensor):
                    if self.is_new(value) and could_be_weights(path, value):
                        self._applied.add(rule)
                        break
                elif id(value) not in self.seen and path.rpartition(".")[2] not in REQUESTS:
                    parts = [(f"{path}.{name}", part) for name, part in _parts(value)]
                    if parts:
                        self.seen.add(id(value))
                    objects.extend(parts)
            else:
                self._applied.add(rule)

    def is_new(self, tensor: Tensor) -> bool:
        """Return whether a tensor holds data that was not met before."""
        if not _holds_data(tensor):
            return False
        try:
            place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        except RuntimeError:  # a tensor subclass without memory of its own
            return False
        if tensor.dtype is torch.int64 and tensor.numel() == 1:  # an address or a counter
            return False
        known = place in self.seen
        self.seen.add(place)
        return not known


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the objects that ``value`` consists of, by name, if there can be tensors among them."""
    if isinstance(value, _CONTAINERS):
        yield from ((i, part) for i, part in enumerate(list(value)) if not isinstance(part, _PLAIN))
    elif isinstance(value, dict):
        named = ((key, part) for key, part in list(value.items()) if isinstance(key, (str, int)))
        yield from ((key, part) for key, part in named if not isinstance(part, _PLAIN))
    elif isinstance(value, functools.partial):
        yield from (*enumerate(value.args), *value.keywords.items(), ("func", value.func))
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
    elif isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        yield from ((name, _content(cell)) for name, cell in zip(value.__code__.co_freevars, cells, strict=True))
        yield from (*enumerate(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items(), *vars(value).items())
    elif isinstance(value, nn.Module):  # one that no other module has registered
        yield from (*value._parameters.items(), *value._buffers.items(), *value._modules.items())
        yield from ((name, part) for name, part in list(vars(value).items()) if name not in _OWN)
    elif not _foreign(value):
        yield from list(getattr(value, "__dict__", {}).items())
        yield from _slots(value)


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    yield name, slot.__get__(value)
                except AttributeError:  # not filled yet
                    continue


def _foreign(value: Any) -> bool:
    return isinstance(value, (type, types.ModuleType)) or type(value).__module__.split(".")[0] in _FOREIGN


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _holds_data(tensor: Tensor) -> bool:
    return tensor.device.type != "meta" and tensor.numel() > 0
