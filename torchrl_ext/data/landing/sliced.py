"""`Sliced` is a tensor of its full shape of which only some blocks are there, for loaders that take slices alone.

A model's loader cuts what it needs out of a full checkpoint tensor by views (narrow, transpose, view), and copies the
view. A `Sliced` follows such views without any memory behind them, as regions of the full tensor, and looks a region up
in its blocks when something wants its values. What is not there is an error; nothing is ever made up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from torchrl_ext.base.errors import ConfigError, IntegrityError
from torchrl_ext.base.types import ParamMeta, dtype_name
from torchrl_ext.data.weights.view import Block, View

__all__ = ["Sliced", "memory_of", "part_of"]


def memory_of(block: Block, parts: Iterable[tuple[Block, Tensor]]) -> Tensor | None:
    """Return the memory of a block in the first of these parts that has all of it: a view; None where none has.

    Args:
        block: of a full tensor.
        parts: blocks of the same tensor, and their elements.
    """
    for own, data in parts:
        if own.contains(block):
            return data[block.within(own)]
    return None


def part_of(tensor: Tensor, block: Block) -> Tensor | None:
    """Return the memory of a block of a full tensor, or of a `Sliced`: a view; None where it is not there.

    Raises:
        ConfigError: ``tensor`` is a view of a `Sliced`.
    """
    if not isinstance(tensor, Sliced):
        return tensor[block.within(Block.whole(tensor.shape))]
    region = tensor._region
    if region.shape != tensor.meta.shape or not region.is_contiguous():
        raise ConfigError(f"a view of {tensor.meta.name!r} was used in place of the full tensor")
    return memory_of(block, tensor.parts)


@final
class Sliced(Tensor):
    """A tensor of the shape and dtype of a checkpoint tensor, of which only some blocks hold data.

    Views of it are `Sliced`, too, and read nothing. Whatever needs values (a copy from it, a cast, a computation) reads
    those of its region, which have to be there. Nothing writes into it but the owner of the parts.

    Attributes:
        meta: the full tensor that this is, or is a view of.
        parts: blocks of the full tensor, and their elements: tensors of the block's shape, with any strides.
    """

    meta: ParamMeta
    parts: tuple[tuple[Block, Tensor], ...]
    _region: Tensor  # of the meta device: shape, strides and offset in the full tensor

    # what torch's own operators would make of the result of each is not wanted
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(meta: ParamMeta, parts: Sequence[tuple[Block, Tensor]]) -> Sliced:
        """Return the full tensor ``meta`` with these parts of it.

        Args:
            meta: name, shape and dtype.
            parts: blocks, and tensors of their shape and of the dtype, on one device.

        Raises:
            ConfigError: a part is of another shape or dtype, on another device, or out of bounds.
        """
        every = Block.whole(meta.shape)
        for block, data in parts:
            fits = len(block.start) == len(meta.shape) and every.contains(block) and tuple(data.shape) == block.shape
            if not fits or (data.dtype, data.device) != (meta.dtype, parts[0][1].device):
                raise ConfigError(
                    f"a part of {meta} is {dtype_name(data.dtype)} {list(data.shape)} on {data.device}, for {block}",
                    expected="the block's shape, within the tensor, and one dtype and device",
                )
        return _sliced(meta, tuple(parts), torch.empty(meta.shape, dtype=meta.dtype, device="meta"))

    @staticmethod
    def cut(name: str, tensor: Tensor, blocks: Sequence[Block], into: Sliced | None = None) -> Sliced:
        """Return copies of some blocks of a full tensor, in memory of their own or in the parts of ``into``.

        Raises:
            ConfigError: a block lies in no part of ``into``.
        """
        if into is None:
            parts = [(block, tensor[block.within(Block.whole(tensor.shape))].clone()) for block in blocks]
            return Sliced.of(ParamMeta.of(name, tensor), parts)
        for block in blocks:
            target = part_of(into, block)
            if target is None:
                raise ConfigError(f"{block} of {name!r} lies outside the blocks that may be filled")
            target.copy_(tensor[block.within(Block.whole(tensor.shape))])
        return into

    def read(self) -> Tensor:
        """Return the elements of the region, of its shape: a view of a part where one has them all, else a copy.

        Raises:
            IntegrityError: not all of them are there; names the tensor and the block.
        """
        view = View.seen(self._region)
        if not view.numel:
            return torch.empty(view.sizes, dtype=self.meta.dtype, device=self.device)
        walk = view.walk(self.meta.shape)
        for block, data in self.parts:
            if walk is not None and block.contains(walk.block):
                return walk.of(data, block)
        around = Block.whole(self.meta.shape) if walk is None else walk.block
        cut = view.of if walk is None else partial(walk.of, block=around)
        found = torch.empty(around.shape, dtype=self.meta.dtype, device=self.device)
        there = torch.zeros(around.shape, dtype=torch.bool, device=self.device)
        for block, data in self.parts:
            common = around.meet(block)
            if common is not None:
                found[common.within(around)] = data[common.within(block)]
                there[common.within(around)] = True
        lost = view.positions(cut(there).reshape(-1).logical_not().nonzero().squeeze(1))
        if lost.numel():
            at = torch.unravel_index(lost, self.meta.shape)
            raise self._lost(Block(tuple(int(one.min()) for one in at), tuple(int(one.max()) + 1 for one in at)))
        return cut(found)

    def _lost(self, block: Block) -> IntegrityError:
        held = ", ".join(str(own) for own, _ in self.parts) or "nothing"
        return IntegrityError(
            f"{block} of tensor {self.meta.name!r} did not come to this worker, and its loader reads it",
            expected=f"reads within {held}, as when the loader was recorded",
            state="the model holds part of an update",
            hint="report the model and the engine's version; a transport that sends whole tensors has no such limit",
        )

    def _apart(self, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``change`` of the region: of its values, or of those that are there where some are not."""
        view = View.seen(self._region)
        walk = view.walk(self.meta.shape)
        if walk is None or not walk.straight or any(block.contains(walk.block) for block, _ in self.parts):
            return change(self.read())
        parts = []
        for block, data in self.parts:
            found = walk.restrict(block)
            if found is not None:
                own, inner = found
                parts.append((own, change(inner.of(data, block))))
        if not parts:
            raise self._lost(walk.block)
        return Sliced.of(ParamMeta(self.meta.name, parts[0][1].dtype, view.sizes), parts)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Follow views, do nothing for copies to where there are no data, and read the region for all else."""
        kwargs = kwargs or {}
        if func._can_decompose():  # in inference mode what is made of other operators comes as one
            return func.decompose(*args, **kwargs)
        first = args[0] if args else None
        written = [
            args[index]
            for index, argument in enumerate(func._schema.arguments)
            if index < len(args) and argument.alias_info is not None and argument.alias_info.is_write
        ]
        if any(isinstance(one, Sliced) for one in written) or isinstance(kwargs.get("out"), Sliced):
            raise ConfigError(f"{func} would write into a tensor that came in slices", state="nothing was written")
        if func.overloadpacket is torch.ops.aten.is_pinned:
            return False
        target = written[0] if written else first
        to_nowhere = torch.device(kwargs.get("device") or "cpu").type == "meta"
        if to_nowhere or (isinstance(target, Tensor) and target.is_meta):
            return func(*_unread(args), **_unread(kwargs))
        if isinstance(first, Sliced):
            if _is_view(func):
                return first._viewed(func(*_unread(args), **_unread(kwargs)), func, args, kwargs)
            if func.overloadpacket in _CASTS:
                return first._apart(lambda data: func(data, *args[1:], **kwargs))
        return func(*_read(args), **_read(kwargs))

    def _viewed(self, region: Any, func: Any, args: Any, kwargs: Any) -> Any:
        memory = self._region.untyped_storage()._cdata
        for one in tree_flatten(region)[0]:
            seen_otherwise = one.dtype != self.meta.dtype or one.is_conj() or one.is_neg()
            if seen_otherwise or one.untyped_storage()._cdata != memory:
                return func(*_read(args), **_read(kwargs))
        return tree_map_only(Tensor, lambda one: _sliced(self.meta, self.parts, one), region)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's own would read the values
        return f"Sliced({self.meta}, {list(self.shape)} of {', '.join(str(own) for own, _ in self.parts)})"


_CASTS = {torch.ops.aten._to_copy, torch.ops.aten.clone}


def _sliced(meta: ParamMeta, parts: tuple[tuple[Block, Tensor], ...], region: Tensor) -> Sliced:
    found = Tensor._make_wrapper_subclass(
        Sliced,
        region.shape,
        strides=region.stride(),
        storage_offset=region.storage_offset(),
        dtype=meta.dtype,
        device=parts[0][1].device if parts else torch.device("cpu"),
    )
    found.meta, found.parts, found._region = meta, parts, region
    return found


def _is_view(func: Any) -> bool:
    if func.overloadpacket is torch.ops.aten._unsafe_view:  # what `reshape` does with a copy that nobody else has
        return True
    returns = [one.alias_info for one in func._schema.returns]
    return bool(returns) and all(info is not None and not info.is_write for info in returns)


def _unread(value: Any) -> Any:
    """Return arguments with tensors without data in the place of sliced ones."""
    return tree_map_only(Sliced, lambda one: one._region, value)


def _read(value: Any) -> Any:
    return tree_map_only(Sliced, lambda one: one.read(), value)
