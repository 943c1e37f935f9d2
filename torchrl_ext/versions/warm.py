"""Compile the loops that a model's updates need while ends connect, so that no update waits for a compiler.

What an encoding needs is found by use: versions of small tensors are published, read and landed. A trainer does so in a
thread. An engine generates meanwhile, and a compiler would hold the interpreter lock: there a process of its own
compiles first, at low priority, and the engine only loads what that leaves in the cache (`torchrl_ext.kernels.jit`). A
stamp beside the cached code says that it is complete, for this processor and these sources.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrl_ext.codecs.base import Codec, codec_from_json, make_codec
from torchrl_ext.codecs.choice import AutoBlocks, BlockEncoding
from torchrl_ext.codecs.units import unit_of
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import WeightSyncError
from torchrl_ext.kernels.base import BITS
from torchrl_ext.landing.loader import TensorsLoader
from torchrl_ext.stores import Chain, LocalStore
from torchrl_ext.types import ParamMeta
from torchrl_ext.versions.checkpoint_reader import PublishedVersion
from torchrl_ext.versions.checkpoint_writer import FullWriter
from torchrl_ext.versions.reader import ChainReader
from torchrl_ext.versions.writer import ChainWriter, Copies
from torchrl_ext.weights.source import MappingSource

__all__ = ["Warming", "cache_folder", "rehearse"]

log = logging.getLogger("torchrl_ext")

_DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
_APART = (50, 2, 1)  # elements from one that changes to the next, in each version
_SMALL, _LARGE = 4096, (1 << 17) + 64  # one that is copied beside others, and one that is scanned where it lies
_COMPILER_S = 300.0
_WARM: dict[tuple[str, int], threading.Event] = {}
_LOCK = threading.Lock()


class Warming:
    """Compiles or loads the loops that a model's updates need, in a thread of its own.

    Args:
        codec: the encoding.
        params: of the model that will be updated.
        beside: this process serves meanwhile: another one compiles.
    """

    def __init__(self, codec: Codec | BlockEncoding, params: Iterable[ParamMeta], *, beside: bool) -> None:
        self._codec, self._beside = make_codec(codec.name), beside  # one of its own: what is compiled tells no speed
        widths = set()
        for dtype in {meta.dtype for meta in params}:
            with suppress(WeightSyncError):  # publishing names a dtype that cannot be coded
                widths.add(unit_of(dtype).width)
        keys = {width: (codec.name, width) for width in sorted(widths)}
        with _LOCK:
            self._mine = [width for width, key in keys.items() if key not in _WARM]  # others are under way, or ready
            self._wanted = {width: _WARM.setdefault(key, threading.Event()) for width, key in keys.items()}
        if self._mine:
            threading.Thread(target=self._run, name="torchrl-ext-warm", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` seconds and return whether all loops are ready; others compile on first use."""
        within = Deadline(timeout_s)
        return all(ready.wait(within.left_s) for ready in self._wanted.values())

    def _run(self) -> None:
        began = time.monotonic()
        try:
            if self._beside and not _stamp(self._codec, self._mine).exists():
                _compile_beside(self._codec, self._mine)
            rehearse(self._codec, self._mine)
        except Exception:  # the update itself meets the same error, and can say more about it
            log.warning("compiled loops could not be prepared", exc_info=True)
        finally:
            for width in self._mine:
                self._wanted[width].set()
        log.info("compiled loops were ready after %.1f s, kept in %s", time.monotonic() - began, cache_folder())


def _forget_others() -> None:
    """Forget, in a forked child, the loops that were being compiled: only the parent has their thread."""
    for key in [key for key, ready in _WARM.items() if not ready.is_set()]:
        del _WARM[key]


os.register_at_fork(after_in_child=_forget_others)


def rehearse(codec: Codec | BlockEncoding, widths: Iterable[int]) -> None:
    """Compile loops by use: publish, read and land versions of small tensors, with every codec that may be chosen.

    Args:
        codec: the encoding.
        widths: bytes per element.
    """
    options = tuple(map(make_codec, ("ulp", "bitmap", "dense"))) if isinstance(codec, AutoBlocks) else ()
    for width in widths:
        _publish_and_land(codec, width, (_SMALL, _LARGE))
        for option in options:
            _publish_and_land(option, width, (_SMALL,))
        try:
            _stamp(codec, [width]).touch()
        except OSError as error:
            log.debug("the cache gets no stamp: %s", error)


def _publish_and_land(codec: Codec | BlockEncoding, width: int, counts: Iterable[int]) -> None:
    tensors: dict[str, Tensor] = {
        str(count): torch.arange(count).to(BITS[width]).view(_DTYPES[width]) for count in counts
    }
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-warm-") as root:
        store = LocalStore(root)
        chain, full = Chain(store), FullWriter(sys.maxsize)
        writer = ChainWriter(
            store,
            chain,
            "warm",
            container=codec.container,
            full=full,
            keyframe_every=0,
            base=None,
            keep_files=True,
            baseline=partial(Copies, codec),
        )
        reader = ChainReader(chain, partial(PublishedVersion, store))
        reader.retain(lambda name: codec.whole_base)
        writer.publish(MappingSource(tensors), 1)
        loader = TensorsLoader(dict(reader.tensors(reader.open(1), {})))
        loader.position_digests()
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


def cache_folder() -> str | None:
    """Return the directory of the kernels' compiled loops, or None if none is writable; others lie by their sources."""
    from torchrl_ext.kernels.host_loops import digest_piece

    return digest_piece.stats.cache_path


def _stamp(codec: Codec | BlockEncoding, widths: Iterable[int]) -> Path:
    """Return the path of the stamp of a complete cache; for several widths, of the largest, which is made last."""
    import llvmlite
    import numba
    from llvmlite import binding

    from torchrl_ext.codecs import block_loops, token_loops
    from torchrl_ext.kernels import host_lists, host_loops

    about: list[Any] = [sys.version, numba.__version__, llvmlite.__version__, binding.get_host_cpu_name()]
    about += [sorted(binding.get_host_cpu_features().items()), codec.to_json(), max(widths)]
    for module in (host_lists, host_loops, token_loops, block_loops):
        about.append(hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest())
    name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
    return Path(cache_folder() or os.devnull + ".d") / f"torchrl_ext-{name}.warm"


def _compile_beside(codec: Codec | BlockEncoding, widths: list[int]) -> None:
    if cache_folder() is None:
        log.warning(
            "compiled loops cannot be kept: no directory is writable. They are compiled each time this process "
            "starts. Next: set NUMBA_CACHE_DIR to a directory that it may write to"
        )
        return
    command = [sys.executable, "-m", "torchrl_ext.versions.warm", json.dumps([codec.to_json(), widths])]
    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=_COMPILER_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the process that compiles loops failed, so this process compiles them: %s", error)


if __name__ == "__main__":  # the process beside an engine, which waits for it
    os.nice(10)
    _codec, _widths = json.loads(sys.argv[1])
    rehearse(codec_from_json(_codec), _widths)
