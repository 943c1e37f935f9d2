"""Compile the loops that a model's updates need while ends connect, so that no update waits for a compiler."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterable
from contextlib import suppress

import torch

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.base.registry import encodings
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.deltas.bits import BITS
from torchrl_ext.data.deltas.table import unit_of
from torchrl_ext.data.landing.loader import TensorsLoader
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.store import MemoryStore
from torchrl_ext.data.versions.kept import KeptTensors
from torchrl_ext.data.versions.owned import Owned
from torchrl_ext.data.versions.reader import ChainReader
from torchrl_ext.data.versions.writer import ChainWriter
from torchrl_ext.data.weights.digests import digests_of
from torchrl_ext.data.weights.source import MappingSource

__all__ = ["compile_loops"]

log = logging.getLogger("torchrl_ext")

_DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
_QUICK_S = 3.0  # loading them from numba's cache takes less
_COMPILES = "compiling the loops of encoding %r for elements of %d byte(s): some ten seconds, once per machine"
_APART = (50, 2, 1)  # elements from one that changes to the next, in each version
_SMALL, _LARGE = 4096, (1 << 17) + 64  # one that is copied beside others, and one that is scanned where it lies


def compile_loops(encoding: str, params: Iterable[ParamMeta]) -> None:
    """Compile or load the loops that updates of a model need, which takes seconds where nothing is in numba's cache.

    Args:
        encoding: its name.
        params: of the model.
    """
    widths = set()
    for dtype in {meta.dtype for meta in params}:
        with suppress(ConfigError):  # publishing names a dtype that cannot be coded
            widths.add(unit_of(dtype).width)
    for width in sorted(widths):
        for kind in ("ulp", "bitmap") if encoding == "auto" else (encoding,):
            slow = threading.Timer(_QUICK_S, log.warning, (_COMPILES, kind, width))
            slow.daemon = True
            slow.start()
            try:
                _compile(kind, width)
            finally:
                slow.cancel()


@functools.cache
@torch.inference_mode(False)  # a worker of SGLang's joins in that mode, whose tensors no patch may change
@torch.no_grad()
def _compile(encoding: str, width: int) -> None:
    """Publish, read and land versions of small tensors, with elements of ``width`` bytes."""
    sizes, bits = (_SMALL, _LARGE), BITS[width]
    tensors = {str(size): torch.arange(size).to(bits).view(_DTYPES[width]) for size in sizes}
    kept, codec, store = KeptTensors(), encodings.make(encoding), MemoryStore()
    writer = ChainWriter(Chain(store), Owned(codec, kept), keyframe_every=0, base=None, keep_files=True)
    writer.publish(MappingSource(tensors), 1)
    kept.digests = {name: one.hex() for name, one in digests_of(tensors).items()}
    reader = ChainReader(Chain(store), open_full=kept.open, copies=lambda name: codec.whole_base)
    loader = TensorsLoader(dict(reader.tensors(reader.open(1), {})))
    loader.digests()
    for version, apart in enumerate(_APART, 2):
        for tensor in tensors.values():
            tensor.view(bits)[::apart] += 1
        writer.acknowledge()
        writer.publish(MappingSource(tensors), version)
        if (changes := reader.changes(version)) is not None:
            loader.stage(changes)
            loader.commit()
            reader.advance(changes)
