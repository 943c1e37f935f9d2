"""The most resident memory that a block of a test or of a benchmark adds."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def track_peak() -> Iterator[list[int]]:
    """Note the most resident memory that the block adds, in bytes; the list stays empty where it cannot be known.

    Linux: writing 5 to ``/proc/self/clear_refs`` resets the high-water mark in ``/proc/self/status`` (proc(5)).
    """
    extra: list[int] = []
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # what glibc keeps of earlier work would hide the block's own
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident_bytes("VmRSS")
    except OSError:
        yield extra
        return
    yield extra
    extra.append(_resident_bytes("VmHWM") - before)


def _resident_bytes(field: str) -> int:
    """Return a field of ``/proc/self/status``, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))
