"""Rules by which a rehearsal judges where no engine promises anything: all of them, with their constants.

Each may be wrong for an engine that nobody has tried. A report therefore names the rules that were applied, and where.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

__all__ = ["DIFFERING", "OBJECTS", "REQUESTS", "RULES", "is_table", "is_varied", "sample"]

OBJECTS = 100_000
"""Objects below one module in which tensors are looked for; numbers and strings do not count."""

REQUESTS = frozenset({"kv_cache", "kv_caches", "forward_context", "static_forward_context"})
"""Attributes, by their full names, in which engines keep the state of requests, or the layers of other models."""

TABLES = (
    *("cos", "sin", "rope", "rotary", "freq", "alibi", "mask"),
    *("workspace", "buffer", "cache", "lora", "embeds", "input_", "state"),
)
"""Words in names of tensors that kernels compute by themselves, or keep for requests, and that no load brings."""

SAMPLE, DISTINCT = 512, 16

DIFFERING = 0.9
"""Share of a layer's outputs that a new weight changes; a few may be equal by chance."""

RULES: Mapping[str, str] = MappingProxyType(
    {
        "bound": f"a layer with more than {OBJECTS:,} objects below it is unproven",
        "requests": f"no load writes to what is called {', '.join(sorted(REQUESTS))}",
        "table": f"no load writes to a tensor with one of these words in its name: {', '.join(TABLES)}",
        "vector": "a derived tensor of one dimension may stay as it was",
        "unloaded": "a parameter or buffer in which no checkpoint tensor lands may stay as it was",
        "uniform": f"a tensor of integers, or with fewer than {DISTINCT} values among {SAMPLE}, may stay as it was",
        "answer": f"a weight has arrived if it changes {DIFFERING:.0%} of the layer's outputs for a fixed input",
        "indices": "small integer tensors, bool and g_idx hold indices or sizes, and stay as they are",
    }
)
"""What each rule says, by name."""


def is_table(path: str) -> bool:
    """Return whether the rule ``table`` applies to a name."""
    return any(word in path.lower() for word in TABLES)


def is_varied(tensor: Tensor) -> bool:
    """Return whether the rule ``uniform`` does not apply to a tensor."""
    return tensor.is_floating_point() and sample(tensor).numel() >= DISTINCT


def sample(tensor: Tensor) -> Tensor:
    """Return some of a tensor's values in float32, each once, sorted."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)].float().unique()
