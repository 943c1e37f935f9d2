"""``python -m tests.bench transport``: what ``torchrl-ext bench transport`` measures, kept as a record."""

from __future__ import annotations

from typing import Any, Literal

from torchrl_ext.cli.bench import measure_transports


def measure(*, repeats: int = 7, size: Literal["full", "small", "tiny"] = "full") -> dict[str, Any]:
    """Measure `collective` and `disk` between two processes, beside a flat broadcast, and a file and an fsync."""
    return measure_transports(size, repeats)
