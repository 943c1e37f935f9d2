"""What the plugins of vLLM and SGLang share: how they register, and how the workers of one engine agree.

Workers exchange messages about an update over a process group that the engine has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import distributed

from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.landing.patcher import Share
from torchrl_ext.data.weights.checkpoint import revised
from torchrl_ext.data.weights.digests import PositionDigest

__all__ = ["agree", "combine", "enable", "started_with"]

log = logging.getLogger("torchrl_ext")

_SIGN = 1 << 63
_UNKNOWN = (0, 0, -1, 0)


def enable(tested: str, use: Callable[[], None]) -> None:
    """Register with an engine, and log a warning if its release lacks something: an error would end the server.

    Args:
        tested: the engine and the release that the plugin is made for.
        use: makes use of the engine's internals.
    """
    try:
        use()
    except Exception as error:
        log.warning(
            "torchrl_ext needs %s, and this release cannot follow a trainer: %s: %s",
            tested,
            type(error).__name__,
            error,
            exc_info=log.isEnabledFor(logging.DEBUG),
        )


def started_with(owner: Any, config: Any) -> str:
    """Return the checkpoint that an SGLang was started with: its own record is of what it loaded last.

    Args:
        owner: the engine's object that lives as long as its weights; it remembers the answer to the first call.
        config: the engine's configuration of the model.
    """
    start = revised(str(config.model_path), getattr(config, "revision", None))
    return str(vars(owner).setdefault("torchrl_ext_started_with", start))


def agree(words: str, *groups: distributed.ProcessGroup) -> list[str]:
    """Return the messages of all workers, of any length, in order of rank.

    Every worker has to call it, at the same point of its work.

    Args:
        words: this worker's message.
        groups: the groups that the worker is in, the innermost first: its own ranks vary fastest.
    """
    spoken = words.encode("utf-8", "replace")
    lengths = [int(length) for length in _gather_all(torch.tensor([[len(spoken)]]), groups)]
    if not any(lengths):
        return [""] * len(lengths)
    row = torch.frombuffer(bytearray(spoken.ljust(max(lengths), b"\0")), dtype=torch.uint8)
    rows = _gather_all(row.unsqueeze(0), groups).numpy()
    return [message[:length].tobytes().decode("utf-8") for message, length in zip(rows, lengths, strict=True)]


def combine(
    own: Mapping[str, PositionDigest],
    shares: Mapping[str, Share],
    params: Iterable[ParamMeta],
    group: distributed.ProcessGroup,
) -> dict[str, PositionDigest]:
    """Return digests of the tensors that the workers hold together; tensors whose parts overlap are left out.

    Workers need not know the same tensors: with expert parallelism one may hold packed what another lacks.

    Args:
        own: the digest of what this worker holds of each tensor; tensors that it cannot tell of are left out for all.
        shares: how much it holds, and where (`torchrl_ext.data.landing.patcher.Patcher.shares`).
        params: the tensors, in the same order on every worker.
        group: the workers.
    """
    known = tuple(params)
    if not known:
        return {}
    if distributed.get_world_size(group) == 1:
        mine = (meta for meta in known if meta.name in own)
        return {meta.name: own[meta.name] for meta in mine if shares[meta.name].units == meta.numel}
    rows = [_row(own[meta.name], shares[meta.name]) if meta.name in own else _UNKNOWN for meta in known]
    every = _gather(torch.tensor(rows, dtype=torch.int64), group)
    found = {}
    for meta, *held in zip(known, *(row.tolist() for row in every), strict=True):
        apart = set(map(tuple, held))  # equal shares are one share, held twice
        if _UNKNOWN not in apart and sum(share[2] for share in apart) == meta.numel:
            words = (PositionDigest(first % 2**64, second % 2**64) for first, second, _, _ in apart)
            found[meta.name] = sum(words, PositionDigest())
    return found


def _gather_all(row: torch.Tensor, groups: Iterable[distributed.ProcessGroup]) -> torch.Tensor:
    for group in groups:
        row = torch.cat(_gather(row, group))
    return row


def _gather(row: torch.Tensor, group: distributed.ProcessGroup) -> list[torch.Tensor]:
    if distributed.get_world_size(group) == 1:
        return [row]
    every = [torch.empty_like(row) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(every, row, group=group)
    return every


def _row(digest: PositionDigest, share: Share) -> tuple[int, int, int, int]:
    """Return a worker's share as four int64: two digest words, its size, and where it lies."""
    first, second = (word - 2 * _SIGN if word >= _SIGN else word for word in (digest.first, digest.second))
    return first, second, *share
