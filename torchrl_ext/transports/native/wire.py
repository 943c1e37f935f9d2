"""How stock engines want tensors cut into broadcasts, and broadcasts into calls.

Both wires carry the bytes of tensors one after the other, without padding, and take a tensor out by a view of its
dtype. So none may begin where its element size does not divide its place.

* SGLang (``load_format="flattened_bucket"`` of ``/update_weights_from_distributed``, `sglang.srt.weight_sync`): one
  call, one broadcast. We end a bucket before the tensor that does not fit, or would not be aligned.
* vLLM (backend ``nccl`` with ``packed``, `vllm.distributed.weight_transfer.packed_tensor`): a call has any number of
  broadcasts, each of which ends with the tensor that makes it larger than the size agreed on. We end a call, too,
  before a tensor that would not be aligned, since every call begins a new broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from torchrl_ext.transports.buckets import Bucket, Span
from torchrl_ext.types import ParamMeta

__all__ = ["MAKES", "Layout", "Make", "layout_of"]

Make = Literal["sglang", "vllm"]
MAKES: tuple[Make, ...] = get_args(Make)
"""Engines whose wires are known."""


@dataclass(frozen=True)
class Layout:
    """How one list of parameters travels.

    Attributes:
        buckets: one broadcast each, but for those without bytes.
        calls: the parameters that each call names, as ``[first, stop]``: ``first <= index < stop``.
    """

    buckets: tuple[Bucket, ...]
    calls: list[list[int]]


def layout_of(params: Sequence[ParamMeta], make: str, bucket_bytes: int) -> Layout:
    """Return how ``params`` travel; a function of its arguments alone, so that two processes agree.

    Args:
        params: what travels, in this order. One without elements has no bytes, and belongs in no call's body.
        make: one of `MAKES`.
        bucket_bytes: size of a broadcast; a larger tensor travels alone to SGLang, and ends a broadcast to vLLM.
    """
    buckets: list[Bucket] = []
    calls: list[list[int]] = []
    spans: list[Span] = []
    filled = 0

    def close(stop: int, *, call: bool) -> None:
        nonlocal spans, filled
        if spans:
            alone = spans[0].stop - spans[0].first == 1 == len(spans)
            buckets.append(Bucket(tuple(spans), filled, direct=alone and filled > 0))
        spans, filled = [], 0
        first = calls[-1][1] if calls else 0
        if call and first < stop:
            calls.append([first, stop])

    for index, meta in enumerate(params):
        askew = bool(filled % meta.dtype.itemsize)
        if askew or (make == "sglang" and filled and filled + meta.nbytes > bucket_bytes):
            close(index, call=True)
        before = spans[-1] if spans else None
        if before and params[before.first].dtype is meta.dtype:
            spans[-1] = replace(before, stop=index + 1, end=before.end + meta.nbytes)
        else:
            spans.append(Span(index, index + 1, 0, meta.nbytes, filled))
        filled += meta.nbytes
        if make == "vllm" and filled > bucket_bytes:
            close(index + 1, call=False)
    close(len(params), call=True)
    return Layout(tuple(buckets), calls)
