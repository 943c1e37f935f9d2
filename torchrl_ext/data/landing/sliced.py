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
from torch.utils._pytree import tree_leaves, tree_map_only

from torchrl_ext.base.errors import ConfigError, IntegrityError
from torchrl_ext.base.types import ParamMeta
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
    """Return the memory of a block of a full tensor, or of a full `Sliced`: a view; None where it is not there."""
    return memory_of(block, tensor.parts if isinstance(tensor, Sliced) else [(Block.whole(tensor.shape), tensor)])


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
        """
        return _sliced(meta, tuple(parts), torch.empty(meta.shape, dtype=meta.dtype, device="meta"))

    @staticmethod
    def cut(name: str, tensor: Tensor, blocks: Sequence[Block], into: Sliced | None = None) -> Sliced:
        """Return copies of some blocks of a full tensor, in memory of their own or in the parts of ``into``."""
        cut = [(block, tensor[block.within(Block.whole(tensor.shape))]) for block in blocks]
        if into is None:
            return Sliced.of(ParamMeta.of(name, tensor), [(block, data.clone()) for block, data in cut])
        for block, data in cut:
            part = part_of(into, block)
            assert part is not None, f"{block} of {name!r} lies outside the blocks that may be filled"
            part.copy_(data)
        return into

    def read(self) -> Tensor:
        """Return the elements of the region, of its shape: a view of a part where one has them all, else a copy.

        Raises:
            IntegrityError: not all of them are there; names the tensor and the block.
        """
        view = View.seen(self._region)
        if not view.numel:
            return torch.empty(view.sizes, dtype=self.meta.dtype, device=self.device)
        walk, around, cut = view.walk(self.meta.shape), Block.whole(self.meta.shape), view.of
        if walk is not None:
            around, cut = walk.block, partial(walk.of, block=walk.block)
            for block, data in self.parts:
                if block.contains(around):
                    return walk.of(data, block)
        found = torch.empty(around.shape, dtype=self.meta.dtype, device=self.device)
        there = torch.zeros(around.shape, dtype=torch.bool, device=self.device)
        for block, data in self.parts:
            if (common := around.meet(block)) is not None:
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
        cuts = [(walk.restrict(block), block, data) for block, data in self.parts]
        parts = [(cut[0], change(cut[1].of(data, block))) for cut, block, data in cuts if cut is not None]
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
        given = zip(args, func._schema.arguments, strict=False)
        written = [one for one, own in given if own.alias_info is not None and own.alias_info.is_write]
        if any(isinstance(one, Sliced) for one in (*written, kwargs.get("out"))):
            raise ConfigError(f"{func} would write into a tensor that came in slices", state="nothing was written")
        if func.overloadpacket is torch.ops.aten.is_pinned:
            return False
        first = args[0] if args else None
        target = written[0] if written else first
        to_nowhere = torch.device(kwargs.get("device") or "cpu").type == "meta"
        unread = partial(tree_map_only, Sliced, lambda one: one._region)
        if to_nowhere or (isinstance(target, Tensor) and target.is_meta):
            return func(*unread(args), **unread(kwargs))
        if isinstance(first, Sliced) and _is_view(func):
            region, memory = func(*unread(args), **unread(kwargs)), first._region.untyped_storage()._cdata
            same = (
                one.dtype == first.meta.dtype
                and not (one.is_conj() or one.is_neg())
                and one.untyped_storage()._cdata == memory
                for one in tree_leaves(region)
            )
            if all(same):
                return tree_map_only(Tensor, lambda one: _sliced(first.meta, first.parts, one), region)
        elif isinstance(first, Sliced) and func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.clone):
            return first._apart(lambda data: func(data, *args[1:], **kwargs))
        read = partial(tree_map_only, Sliced, lambda one: one.read())
        return func(*read(args), **read(kwargs))

    def __repr__(self) -> str:  # type: ignore[override]  # torch's own would read the values
        return f"Sliced({self.meta}, {list(self.shape)} of {', '.join(str(own) for own, _ in self.parts)})"


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
