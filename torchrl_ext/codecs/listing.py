"""Tensors on an accelerator: what changed is listed there, and only that comes to the host to be coded."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.codecs.base import Codec, Encoded, Found, Piece
from torchrl_ext.codecs.patch import check_same
from torchrl_ext.codecs.units import Layout, layout_of
from torchrl_ext.errors import ConfigError
from torchrl_ext.kernels.base import Kernels, Words, flat_bits
from torchrl_ext.kernels.host import unsigned
from torchrl_ext.kernels.select import kernels_on
from torchrl_ext.types import ParamMeta

__all__ = ["choose", "encode_on_device", "working_device"]

_AT_ONCE = 1 << 26  # units: bounds what a list, and the part of a tensor that has to be brought there, take on a device


def working_device(old: Tensor, new: Tensor) -> torch.device:
    """Where two tensors are compared: on the accelerator, if either is there."""
    return old.device if new.device.type == "cpu" else new.device


def choose(codec: Codec, meta: ParamMeta, old: Tensor, new: Tensor) -> Codec:
    """`Codec.choose`, for tensors wherever they are.

    Raises:
        ManifestError: they do not have ``meta``'s dtype and shape.
    """
    check_same(meta, old, new)
    layout = layout_of(meta.dtype)
    where = torch.from_numpy(codec.looks_at(layout.count(meta)))
    sample = (flat_bits(tensor).index_select(0, where.to(tensor.device)) for tensor in (old, new))
    return codec.choose(layout, *(unsigned(bits.cpu()) for bits in sample))


def encode_on_device(
    submit: Callable[..., Future[Piece]],
    codec: Codec,
    kernels: Kernels,
    meta: ParamMeta,
    old: Tensor,
    new: Tensor,
    follow: bool,
) -> Callable[[], Encoded]:
    """List the changes of one tensor and have them coded; neither tensor is needed after the call.

    Args:
        submit: hands a task to a pool.
        codec: one of which ``by_list`` is true.
        kernels: list.
        meta: the parameter.
        old, new: its tensors; the one that is not on the accelerator is brought there in parts.
        follow: make ``old``, which is contiguous, what ``new`` is.

    Returns:
        Waits for the result.

    Raises:
        ConfigError: ``old`` cannot follow.
    """
    if follow and not old.is_contiguous():
        raise ConfigError("a tensor that is to follow must be contiguous")
    layout, device = layout_of(meta.dtype), working_device(old, new)
    before, after = flat_bits(old), flat_bits(new)
    places, olds, news, words = _listed(kernels, device, before, after, follow)
    count = layout.count(meta)
    size = codec.piece_units(layout, count)
    starts = range(0, count, size)
    cuts = np.searchsorted(places, [*starts, count]).tolist()
    pieces: list[Callable[[], Piece]] = []
    for number, start in enumerate(starts):
        own = slice(cuts[number], cuts[number + 1])
        if own.start == own.stop:
            pieces.append(_nothing)
            continue
        found = Found(
            size=min(size, count - start),
            start=start,
            places=places[own] - start,
            before=olds[own].view(layout.dtype),
            after=news[own].view(layout.dtype),
        )
        pieces.append(submit(_coded, codec, layout, found).result)
    return lambda: replace(codec.finish(meta, [piece() for piece in pieces]), digest=words)


def _coded(codec: Codec, layout: Layout, found: Found) -> Piece:
    return codec.encode_listed(layout, found)


def _nothing() -> Piece:
    return Piece(data=b"", changed=0)


def _listed(
    kernels: Kernels, device: torch.device, before: Tensor, after: Tensor, follow: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Words]:
    """Places (int64), old and new bits, and what the change adds to the digest."""
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    one = two = 0
    for start in range(0, before.numel(), _AT_ONCE):
        old, new = (bits[start : start + _AT_ONCE] for bits in (before, after))
        here = [bits.to(device, non_blocking=True) for bits in (old, new)]
        listed = kernels.diff(*here)
        if not listed.places.numel():
            continue
        more = kernels.change_words(listed.places, listed.before, listed.after, start)
        one, two = (one + more[0]) % 2**64, (two + more[1]) % 2**64
        places, olds, news = _on_host(listed.places, listed.before, listed.after)
        if follow and old.device == device:
            kernels.scatter(old, listed.places, listed.after)
        elif follow:
            kernels_on(old.device).scatter(old, places.to(old.device), news.to(old.device))
        parts.append((places.numpy().astype(np.int64) + start, unsigned(olds), unsigned(news)))
    if len(parts) == 1:
        return *parts[0], (one, two)
    none = (np.empty(0, np.int64), *(unsigned(bits[:0].cpu()) for bits in (before, after)))
    return *(np.concatenate(each) for each in zip(none, *parts, strict=True)), (one, two)  # type: ignore[return-value]


def _on_host(*tensors: Tensor) -> list[Tensor]:
    """Copies on the host (or the tensors, where they are there): through pinned memory, at the speed of the bus."""
    if not tensors[0].is_cuda:
        return [tensor.cpu() for tensor in tensors]
    copies: list[Any] = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies
