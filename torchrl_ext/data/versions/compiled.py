"""Compile the loops that a model's updates need while ends connect, so that no update waits for a compiler."""

from __future__ import annotations

import functools
import logging
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor

from torchrl_ext.base.errors import ConfigError, WeightSyncError
from torchrl_ext.base.registry import encodings
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.deltas.blocks import BlockEncoding
from torchrl_ext.data.deltas.kernels import BITS
from torchrl_ext.data.deltas.table import unit_of
from torchrl_ext.data.landing.loader import TensorsLoader
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.local import LocalStore
from torchrl_ext.data.versions.full import FullWriter
from torchrl_ext.data.versions.owned import Owned
from torchrl_ext.data.versions.payloads import FileEncoding
from torchrl_ext.data.versions.reader import ChainReader
from torchrl_ext.data.versions.writer import ChainWriter
from torchrl_ext.data.weights.source import MappingSource

__all__ = ["compile_loops"]

log = logging.getLogger("torchrl_ext")

_DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
_APART = (50, 2, 1)  # elements from one that changes to the next, in each version
_SMALL, _LARGE = 4096, (1 << 17) + 64  # one that is copied beside others, and one that is scanned where it lies


def compile_loops(codec: FileEncoding | BlockEncoding, params: Iterable[ParamMeta]) -> None:
    """Compile or load the loops that updates of a model need, which takes seconds where nothing is in numba's cache.

    Args:
        codec: the encoding.
        params: of the model.
    """
    widths = set()
    for dtype in {meta.dtype for meta in params}:
        with suppress(ConfigError):  # publishing names a dtype that cannot be coded
            widths.add(unit_of(dtype).width)
    try:
        for width in sorted(widths):
            _compile(codec.name, width)
    except (OSError, WeightSyncError) as error:
        log.warning("loops are compiled when an update needs them, as small versions could not be tried: %s", error)


@functools.cache
@torch.inference_mode(False)  # a worker of SGLang's joins in that mode, whose tensors no patch may change
@torch.no_grad()
def _compile(encoding: str, width: int) -> None:
    """Compile loops by use, for elements of ``width`` bytes and every kind of block that may be chosen."""
    _publish_and_land(encodings.make(encoding), width, (_SMALL, _LARGE))
    if encoding == "auto":
        _publish_and_land(encodings.make("bitmap"), width, (_SMALL,))


def _publish_and_land(codec: FileEncoding | BlockEncoding, width: int, counts: Iterable[int]) -> None:
    """Publish, read and land versions of small tensors."""
    tensors: dict[str, Tensor] = {
        str(count): torch.arange(count).to(BITS[width]).view(_DTYPES[width]) for count in counts
    }
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-compiled-") as root:
        store = LocalStore(root)
        chain, own = Chain(store), Owned(codec, FullWriter(sys.maxsize))
        writer = ChainWriter(store, chain, "compiled", own, keyframe_every=0, base=None, keep_files=True)
        reader = ChainReader(chain)
        reader.retain(lambda name: codec.whole_base)
        writer.publish(MappingSource(tensors), 1)
        loader = TensorsLoader(dict(reader.tensors(reader.open(1), {})))
        loader.digests()
        for version, apart in enumerate(_APART, 2):
            for tensor in tensors.values():
                tensor.view(BITS[width])[::apart] += 1
            writer.acknowledge()
            writer.publish(MappingSource(tensors), version)
            if (changes := reader.changes(version)) is None:
                return
            loader.stage(changes)
            loader.commit()
            reader.advance(changes)
