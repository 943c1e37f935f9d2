"""Predicts what shard to shard moves over every link, for published decoders and layouts of trainer and engine.

The bytes are those of the transfer plan that the ``sharded`` transport makes. The seconds are the bytes of the busiest
member divided by the speed of its network interface: packing, landing and the calls of an update come on top.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torchrl_ext.errors import ConfigError
from torchrl_ext.planning.layouts import Layout
from torchrl_ext.planning.shapes import DECODERS
from torchrl_ext.transports.sharded.plans.plan import make_plan

__all__ = ["BUCKET_BYTES", "CASES", "NIC_BYTES_S", "PUBLISHED", "PUBLISHED_NOTES", "sharded_cost"]

NIC_BYTES_S = 50e9
"""Bytes a second of 400 Gbit/s, one interface per accelerator."""

BUCKET_BYTES = 1 << 30

CASES: Mapping[str, Sequence[tuple[str, str]]] = MappingProxyType(
    {
        "qwen3-235b-a22b": (
            ("fsdp8", "dp8-ep8"),
            ("fsdp8", "tp8"),
            ("tp8", "tp8-x4"),
            ("tp4-pp2-dp2-ep8", "dp16-ep16"),
        ),
        "deepseek-v3": (
            ("fsdp64", "tp16"),
            ("fsdp64-ep8", "dp32-ep32"),
            ("tp4-pp4-dp4-ep16", "dp32-ep32"),
            ("tp4-pp4-dp4-ep16", "tp16-x4"),
        ),
        "kimi-k2": (
            ("fsdp64", "tp16"),
            ("fsdp64-ep8", "dp32-ep32"),
            ("tp4-pp4-dp4-ep16", "dp32-ep32"),
            ("tp4-pp4-dp4-ep16", "tp16-x4"),
        ),
    }
)
"""Layouts of trainer and engine by decoder."""

PUBLISHED: Mapping[tuple[str, int, str], float] = MappingProxyType(
    {("qwen3-235b-a22b", 8, "dp8-ep8"): 3.3, ("qwen3-235b-a22b", 8, "tp8"): 6.1}
)
"""Seconds that others report by decoder, trainer ranks and engine: vLLM's ``sharded_rdt`` on H100."""

PUBLISHED_NOTES = (
    "published: vLLM's sharded_rdt, Qwen3-235B-A22B, 472 GB from 8 to 8 H100",
    "SkyRL on it, trainer tp4-pp2 with ep8, engine dp16-ep16: 3.54 s, and 64.7 s by NCCL broadcast",
    "SGLang with Mooncake, Kimi-K2 in FP8, half of these bytes: 7.2 s, and 53 s by NCCL broadcast",
)


def sharded_cost(decoder: str, trainer: str, engine: str, nic_bytes_s: float = NIC_BYTES_S) -> dict[str, Any]:
    """Plan one update, and add up what goes over every link.

    Args:
        decoder: a name of `torchrl_ext.planning.shapes.DECODERS`.
        trainer, engine: as `torchrl_ext.planning.layouts.Layout.of` reads them.
        nic_bytes_s: bytes a second that one member sends, and receives at the same time.

    Returns:
        JSON-safe: the sizes; ``rank_bytes`` and ``worker_bytes``, of the busiest rank and worker; ``link_bytes``, of
        the busiest link; ``share_bytes``, the model / the workers of one engine; ``balance``, the busiest rank / the
        mean; ``seconds``, the least, where nobody ever waits; ``lockstep_seconds``, the most, where no round begins
        before everyone has ended the last; ``broadcast_seconds``, where everybody gets everything;
        ``published_seconds`` or None; and ``plan_seconds``, which making the plan took here.

    Raises:
        ConfigError: there is no such decoder, or no such layout, or a speed that is not above 0.
    """
    if decoder not in DECODERS:
        raise ConfigError(f"there are no shapes of {decoder!r}", expected=f"one of {', '.join(DECODERS)}")
    if not nic_bytes_s > 0:
        raise ConfigError(f"nic_bytes_s is {nic_bytes_s!r}", expected="a number above 0")
    source, target = Layout.of(trainer), Layout.of(engine)
    parts = DECODERS[decoder].parts()
    params = [part.meta for part in parts]
    held, needed = source.shares(parts), target.shares(parts)
    began = time.perf_counter()
    plan = make_plan(params, held, needed, bucket_bytes=BUCKET_BYTES)
    plan_s = time.perf_counter() - began
    total = sum(meta.nbytes for meta in params)
    busiest = max(int(plan.rank_bytes.max()), int(plan.worker_bytes.max()))
    return {
        "decoder": decoder, "trainer": trainer, "engine": engine,
        "parameters": sum(meta.numel for meta in params), "tensors": len(params),
        "ranks": plan.ranks, "workers": plan.workers, "bytes": total,
        "sent_bytes": int(plan.rank_bytes.sum()), "rank_bytes": int(plan.rank_bytes.max()),
        "balance": float(plan.rank_bytes.max() / plan.rank_bytes.mean()),
        "worker_bytes": int(plan.worker_bytes.max()), "link_bytes": int(plan.link_bytes().max()),
        "share_bytes": total / target.size, "over_share": float(plan.worker_bytes.max()) * target.size / total,
        "seconds": busiest / nic_bytes_s,
        "lockstep_seconds": float(plan.round_bytes().max(axis=1).sum() / nic_bytes_s),
        "broadcast_seconds": total / nic_bytes_s, "nic_bytes_s": nic_bytes_s,
        "published_seconds": PUBLISHED.get((decoder, plan.ranks, engine)),
        "rounds": plan.rounds, "plan_seconds": plan_s, "digest": plan.digest,
    }  # fmt: skip
