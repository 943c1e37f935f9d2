"""Where each checkpoint element lands in the parameters that an engine computes with.

A loader's work is copies between views: of a checkpoint tensor on one side (a shard, one head group, one expert), of a
runtime parameter on the other (a slice of a fused one). `record` runs the model's own loader once over tensors of the
meta device, which hold no data, and writes down every copy. What comes out is the model's checkpoint -> runtime map for
this rank, tensor parallelism included, without code for any architecture.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchrl_ext.base.errors import ManifestError, why
from torchrl_ext.base.types import ParamMeta, dtype_name
from torchrl_ext.data.deltas.bits import Piece
from torchrl_ext.data.weights.view import View, has_each_once

__all__ = ["Landing", "Placement", "record"]

Load = Callable[[Iterable[tuple[str, Tensor]]], Any]


@dataclass(frozen=True, kw_only=True)
class Landing:
    """One copy from a checkpoint tensor into a runtime parameter.

    Attributes:
        param: name of the runtime parameter.
        dtype: its dtype; the source has the checkpoint's.
        target: the view of the parameter that is written.
        source: the view of the checkpoint tensor, which is contiguous; where not ``exact``, it says nothing.
        exact: the source is a view of the checkpoint tensor that has no element twice; else something was computed on
            the way (a sum, a stacking, an expansion).
    """

    param: str
    dtype: torch.dtype
    target: View
    source: View
    exact: bool

    @property
    def numel(self) -> int:
        """The number of elements copied."""
        return self.target.numel

    def piece(self, live: Tensor) -> Piece:
        """Return the copy that was recorded, which is exact, with the live parameter in the place of its stand-in."""
        destination = self.target.of(live.detach())
        return Piece(destination=destination, offset=self.source.offset, strides=self.source.strides)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The map of one rank from checkpoint tensors to runtime parameters.

    Attributes:
        params: what was recorded, in order.
        landings: checkpoint name -> its copies, in the loader's order; a name that lands nowhere has none.
        written: runtime parameter -> number of elements that the copies and fills wrote.
    """

    params: tuple[ParamMeta, ...]
    landings: Mapping[str, tuple[Landing, ...]]
    written: Mapping[str, int]

    def nowhere(self) -> tuple[str, ...]:
        """Return the checkpoint names that land in no parameter of this rank."""
        return tuple(meta.name for meta in self.params if not self.landings[meta.name])

    def sources(self, param: str) -> tuple[str, ...]:
        """Return the checkpoint names that land in runtime parameter ``param``."""
        return tuple(
            name for name, landings in self.landings.items() if any(landing.param == param for landing in landings)
        )

    def lossy(self) -> Iterator[tuple[ParamMeta, Landing]]:
        """Yield parameters and copies whose values would be rounded, or change their kind, in the runtime parameter."""
        for meta in self.params:
            for landing in self.landings[meta.name]:
                if not keeps_values(meta.dtype, landing.dtype):
                    yield meta, landing


def keeps_values(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether every value of ``source`` is one of ``target``, and of the same kind."""
    if source == target:
        return True
    same_kind = source.is_floating_point == target.is_floating_point and torch.bool not in (source, target)
    if not same_kind or source.itemsize >= target.itemsize:
        return False
    return torch.promote_types(source, target) == target


def record(load: Load, params: Iterable[ParamMeta], targets: Mapping[str, Tensor]) -> Placement:
    """Run ``load`` over meta tensors and write down what lands where. No data moves and no parameter changes.

    Args:
        load: the model's loader; takes (name, tensor) pairs. It must write to ``targets``.
        params: the checkpoint tensors to record.
        targets: runtime parameters by name, on the meta device.

    Raises:
        ManifestError: the loader refuses a name or a shape; its own words are in the message.
    """
    params, seen, observer = tuple(params), list[ParamMeta](), _Observer(targets)

    def pairs() -> Iterator[tuple[str, Tensor]]:
        for meta in params:
            seen.append(meta)
            yield meta.name, observer.source(meta)

    try:
        with torch.no_grad(), observer:
            load(pairs())
    except ManifestError:
        raise
    except Exception as error:  # a loader may refuse by any exception
        raise ManifestError(
            f"the model's loader refuses the parameters{f' at {seen[-1]}' if seen else ''}: {why(error):.300}",
            state="nothing was changed",
            hint="send the names, shapes and dtypes of the checkpoint that the engine was started with",
        ) from error
    landings = {meta.name: tuple(observer.landings[meta.name]) for meta in params}
    return Placement(params=params, landings=landings, written=observer.written)


class _Observer(TorchDispatchMode):
    """Observes every operator that the loader runs; copies and fills of targets are written down and not executed."""

    def __init__(self, targets: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.landings = defaultdict[str, list[Landing]](list)
        self.written = dict.fromkeys(targets, 0)
        self._targets = {_key(tensor): (name, tensor) for name, tensor in targets.items()}
        self._views: dict[int, str] = {}  # storages of the checkpoint tensors themselves
        self._origins: dict[int, frozenset[str]] = {}  # and of everything computed from them
        self._kept: list[Tensor] = []  # a freed storage's key could come again
        self._scalars: frozenset[str] = frozenset()

    def source(self, meta: ParamMeta) -> Tensor:
        """Return the stand-in for one checkpoint tensor."""
        tensor = torch.empty(meta.shape, dtype=meta.dtype, device="meta")
        key = _key(tensor)
        self._kept.append(tensor)
        self._views[key], self._origins[key] = meta.name, frozenset([meta.name])
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet is torch.ops.aten._local_scalar_dense and args[0].is_meta:
            self._scalars = self._origin(args)  # `.item()`: there is no value, only where it came from
            return torch.zeros((), dtype=args[0].dtype).item()
        if packet in _WRITES and isinstance(args[0], Tensor):
            target, source = args[0], args[1] if len(args) > 1 else None
            if _key(target) in self._targets:
                self._write(target, source)
                return target
            if isinstance(source, Tensor) and source.is_meta and not target.is_meta:
                return target  # a live copy that a layer derives from its weights (SGLang's latent attention)
        out = func(*args, **kwargs)
        origin = self._origin((args, kwargs))
        for tensor in _metas(out) if origin else ():
            if _key(tensor) not in self._views and _key(tensor) not in self._targets:
                self._kept.append(tensor)
                self._origins[_key(tensor)] = self._origins.get(_key(tensor), frozenset()) | origin
        return out

    def _write(self, target: Tensor, source: Any) -> None:
        param, whole = self._targets[_key(target)]
        self.written[param] += target.numel()
        names = self._origin(source) or (frozenset() if isinstance(source, Tensor) else self._scalars)
        self._scalars = frozenset()
        for name in sorted(names):
            seen = isinstance(source, Tensor) and _key(source) in self._views
            if seen and source.shape != target.shape:
                raise ManifestError(
                    f"{name!r} meets a part of {param} with another shape: {list(source.shape)}",
                    expected=f"{list(target.shape)}, {dtype_name(target.dtype)}",
                    state="nothing was changed",
                )
            exact = seen and has_each_once(source)
            own = View.seen(target)._replace(offset=int(target.storage_offset() - whole.storage_offset()))
            of = View.seen(source) if exact else View((), ())
            self.landings[name].append(Landing(param=param, dtype=target.dtype, target=own, source=of, exact=exact))

    def _origin(self, value: Any) -> frozenset[str]:
        return frozenset[str]().union(*(self._origins.get(_key(tensor), ()) for tensor in _metas(value)))


_WRITES = {torch.ops.aten.copy_, torch.ops.aten.fill_, torch.ops.aten.zero_}


def _key(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage; meta tensors have no addresses that could tell them apart."""
    return tensor.untyped_storage()._cdata


def _metas(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_meta]
