"""The writing side of a chain: keyframes, deltas, what is kept of them, and copies that deltas are taken against."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Protocol, final

import numpy as np
import torch
import xxhash
from torch import Tensor

from torchrl_ext.codecs.blocks import BlockEncoding
from torchrl_ext.codecs.pipeline import differences, worker_threads
from torchrl_ext.codecs.streams import find
from torchrl_ext.errors import ConfigError, StoreError
from torchrl_ext.kernels.base import flat_bits, linear_keys, unsigned
from torchrl_ext.stores import Store, version_name
from torchrl_ext.stores.base import Draft
from torchrl_ext.stores.chain import Chain
from torchrl_ext.stores.delta_manifest import DIGEST, DeltaManifest
from torchrl_ext.stores.manifest import Manifest
from torchrl_ext.stores.table import ParamTable, unit_bytes
from torchrl_ext.stores.versions import BESIDE, Held
from torchrl_ext.types import ParamMeta
from torchrl_ext.versions.containers import BlockFiles, Coded, FileEncoding, code, write_blocks, write_files
from torchrl_ext.weights.checkpoint import CheckpointSource
from torchrl_ext.weights.digests import digest_of, position_digest
from torchrl_ext.weights.source import WeightSource, checked

__all__ = ["Baseline", "ChainWriter", "Copies", "FlatCopies", "WritesFull"]

log = logging.getLogger("torchrl_ext")

Pairs = Iterator[tuple[str, Tensor]]

_DIGESTED = 1 << 20  # bytes of copies that are digested together, while they lie in a cache
_UNACKNOWLEDGED = 3  # keyframes that stay while no update succeeds


class WritesFull(Protocol):
    """Writes full versions (`torchrl_ext.versions.checkpoint_writer.FullWriter`)."""

    def needed_bytes(self, source: WeightSource) -> int:
        """Return about how many bytes a version of ``source`` takes."""

    def write(self, draft: Draft, source: WeightSource, version: int, run_id: str) -> Manifest:
        """Write every file of a version into ``draft``, the manifest last."""


class ChainWriter:
    """Publishes one trainer's versions into a chain, as keyframes and deltas.

    Args:
        store: where versions are written.
        chain: its versions.
        run_id: of this trainer.
        container: of deltas.
        full: writes keyframes.
        keyframe_every: as in `DeltaTransport`.
        base: checkpoint directory on which the first version of an empty store is a delta.
        keep_files: never remove old versions.
        baseline: makes what deltas are taken against.
    """

    def __init__(
        self,
        store: Store,
        chain: Chain,
        run_id: str,
        *,
        container: str,
        full: WritesFull,
        keyframe_every: int,
        base: str | None,
        keep_files: bool,
        baseline: Callable[[], Baseline],
    ) -> None:
        self._store, self._chain, self._run_id = store, chain, run_id
        self._container, self._full = container, full
        self._keyframe_every, self._base, self._keep_files = keyframe_every, base, keep_files
        self._baseline: Baseline | None = None
        self._new_baseline = baseline
        self._since_keyframe, self._acknowledged = 0, True

    def publish(self, source: WeightSource, version: int, *, keyframe: bool = False) -> DeltaManifest | None:
        """Publish ``source`` as version ``version``, and return its delta; None for a keyframe without one.

        It is a keyframe where ``keyframe`` says so, or one is due. Where a part of the source alone may have changed
        since the version before (`WeightSource.part`), nothing else is looked at, and all else stays as it was.

        After an attempt that fails, which leaves nothing in the store, the next version is a keyframe. So it is after a
        version that not every engine acknowledged, since a delta on that one may be of no use; and where the version
        before is not in the store any more, which somebody emptied.

        Raises:
            StoreError: no space, no permission, no connection.
            ConfigError: the base checkpoint is not one of this model.
            ManifestError: the source does not yield what it declares.
        """
        baseline = self._baseline or self._first_baseline(source)
        base = baseline.version if baseline.fits(source) else None
        if base is not None and not (base[1] < version and (base[1] == 0 or base[1] in self._chain.numbers())):
            base = None
        keyframe |= base is None or not self._acknowledged or 0 < self._keyframe_every <= self._since_keyframe + 1
        if not self._acknowledged:
            self.acknowledge(keyframes=_UNACKNOWLEDGED)
        self._acknowledged, manifest = False, None
        needed = self._full.needed_bytes(source) if keyframe else 0
        try:
            with self._store.draft(version_name(version), needed_bytes=needed) as draft:
                if base is None:
                    baseline.take(source)
                else:
                    delta = DeltaManifest(
                        version=version,
                        base_version=base[1],
                        run_id=self._run_id,
                        base_run_id=base[0],
                        container=self._container,
                        codecs=(),
                        files={},
                        table=baseline.table,
                        changed=np.zeros(len(baseline.metas), DIGEST),
                        digests=baseline.digests,
                        base_digests=baseline.digests[: None if base[1] == 0 else 0],
                    )
                    manifest = baseline.write(delta, source, draft, f"{BESIDE}/" if keyframe else "")
                    baseline.digests = manifest.digests
                if keyframe:
                    self._full.write(draft, baseline, version, self._run_id)
        except BaseException:
            baseline.drain()
            raise
        self._chain.advance(version, keyframe=keyframe)
        baseline.version = (self._run_id, version)
        self._since_keyframe = 0 if keyframe else self._since_keyframe + 1
        return manifest

    @property
    def baseline_bytes(self) -> int:
        """Bytes of the copies that this process keeps, against which the next delta is taken."""
        return 0 if self._baseline is None else sum(map(attrgetter("nbytes"), self._baseline.tensors.values()))

    @property
    def digest(self) -> str:
        """Digest over the position digests of all tensors of the newest version."""
        assert self._baseline is not None
        text = self._baseline.digests.astype(">u8").tobytes().hex()
        return digest_of({meta.name: text[32 * at :][:32] for at, meta in enumerate(self._baseline.metas)})

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """Bytes that each trainer rank wrote of the last delta, in order of rank; empty where one rank writes all."""
        return () if self._baseline is None else self._baseline.rank_bytes

    def restart(self) -> None:
        """Forget what was published, so that the next version is a full one, or a delta on the base checkpoint."""
        self._baseline = None

    def forget(self) -> None:
        """Make the next version a full one alone: what was published is not in the store."""
        if self._baseline is not None:
            self._baseline.version = None

    def renew(self) -> None:
        """Make the next version a keyframe, for readers that hold neither the base nor a version of this chain."""
        self._acknowledged = False

    def acknowledge(self, oldest: int | None = None, *, keyframes: int = 1) -> None:
        """Note that every engine has the version that was published last, and collect old ones.

        Args:
            oldest: what engines may still read; not looked at, since a newer keyframe serves them as well.
            keyframes: how many of the newest keyframes stay, with what follows them.
        """
        self._acknowledged = True
        if not self._keep_files:
            try:
                self._chain.collect(keep_keyframes=keyframes)
            except StoreError as error:  # no reason to call an update failed which engines serve
                log.warning("old weights versions stay: %s", error)

    def _first_baseline(self, source: WeightSource) -> Baseline:
        baseline = self._new_baseline()
        if self._base is not None and self._chain.newest() == 0:  # only the first version of a store follows on it
            baseline.start(self._base, source)
            hasher = xxhash.xxh3_128()  # one name for the content of a whole checkpoint
            rows = zip(baseline.metas, baseline.digests.tolist(), strict=True)
            for name, first, second in sorted((meta.name, *words) for meta, words in rows):
                hasher.update(f"{name}\0{first:016x}{second:016x}\n".encode())
            baseline.version = (f"base-{hasher.hexdigest()}", 0)
        self._baseline = baseline
        return baseline


class Baseline(WeightSource):
    """What the newest version is, against which the next delta is taken; as a source it is what a keyframe holds.

    While a version is being made it is neither the old one nor the new one: `version` is None then, and stays so when
    the attempt fails. The next version is a full one in that case, which takes everything anew.

    Attributes:
        table: the parameters, and the streams of their deltas.
        tensors: copies of them by name, as far as this process has them.
        digests: uint64, shape (parameters, 2): their digests.
        version: run id and number of the version that they are.
        rank_bytes: bytes that each trainer rank wrote of the last delta, in order of rank, where several ranks write.
    """

    def __init__(self) -> None:
        self.table = ParamTable.of(())
        self.tensors: dict[str, Tensor] = {}
        self.digests = np.empty((0, 2), DIGEST)
        self.version: Held | None = None
        self.rank_bytes: tuple[int, ...] = ()
        self._files: Mapping[str, bytes] = {}

    @property
    def metas(self) -> tuple[ParamMeta, ...]:
        """The parameters, in order."""
        return self.table.params

    def params(self) -> tuple[ParamMeta, ...]:
        return self.metas

    def files(self) -> Mapping[str, bytes]:
        return self._files

    @abstractmethod
    def fits(self, source: WeightSource) -> bool:
        """Return whether it is one of the model that ``source`` holds."""

    @abstractmethod
    def start(self, base: str, source: WeightSource) -> None:
        """Become the tensors of a checkpoint directory, as far as they are parameters of ``source``.

        Raises:
            ConfigError: it lacks one of them, or has another one under its name.
        """

    @abstractmethod
    def take(self, source: WeightSource) -> None:
        """Become what ``source`` is now; complete when it has been iterated."""

    @abstractmethod
    def write(self, delta: DeltaManifest, source: WeightSource, draft: Draft, prefix: str) -> DeltaManifest:
        """Write the files of a delta, the manifest last, and become what ``source`` is now.

        Args:
            delta: what is known of it before; with the digests of its base.
            source: the new tensors.
            draft: where files are written.
            prefix: of their names there.
        """


@final
class FlatCopies:
    """Host memory for the streams of a table: one flat tensor for each.

    Args:
        table: has the streams.
        pinned: in pinned memory.

    Attributes:
        table: has the streams.
        bits: of each stream, 1-D.
        parts: views of each stream's segments, of their shapes.
    """

    def __init__(self, table: ParamTable, *, pinned: bool) -> None:
        self.table = table
        self.bits: list[Tensor] = []
        self.parts: list[list[Tensor]] = []
        for stream in table.streams:
            scale = stream.dtype.itemsize // unit_bytes(stream.dtype)
            size, sizes = stream.size // scale, (np.diff(stream.first) // scale).tolist()
            flat = torch.empty(size, dtype=stream.dtype, device="cpu", pin_memory=pinned)
            parts = list(flat.split(sizes))
            for number, (segment, param) in enumerate(zip(stream.segments, stream.params.tolist(), strict=True)):
                shape = table.params[param].shape if segment.sizes is None else segment.sizes
                if len(shape) != 1:  # else it has the shape
                    parts[number] = parts[number].view(shape)
            self.parts.append(parts)
            self.bits.append(flat_bits(flat))

    @property
    def nbytes(self) -> int:
        """The bytes of all streams."""
        return sum(bits.nbytes for bits in self.bits)

    def words(self, stream: int, low: int, high: int) -> np.ndarray:
        """Return the digests of parts ``low`` to below ``high`` of a stream: uint64, shape (parts, 2).

        Where a part is no run of its parameter, the words are 0.
        """
        from torchrl_ext.kernels.host_loops import digest_runs

        own = self.table.streams[stream]
        first, found = own.first[low : high + 1], np.zeros((high - low, 2), DIGEST)
        bits = unsigned(self.bits[stream][int(first[0]) : int(first[-1])])
        addresses = bits.ctypes.data + (first[:-1] - first[0]) * bits.itemsize
        sizes = np.where(own.starts[low:high] < 0, 0, np.diff(first))
        digest_runs(addresses, own.starts[low:high], sizes, bits[:0], linear_keys(), found)
        return found

    def by_name(self) -> dict[str, Tensor]:
        """Return the parts by the names of their parameters, each of which has one part."""
        streams = zip(self.table.streams, self.parts, strict=True)
        rows = ((param, part) for stream, own in streams for param, part in zip(stream.params, own, strict=True))
        return {self.table.params[param].name: part for param, part in rows}


@final
class Copies(Baseline):
    """Copies of every tensor of the newest version, on the host, pinned where the source's tensors are on a GPU.

    Args:
        codec: the encoding of deltas.
    """

    def __init__(self, codec: FileEncoding | BlockEncoding) -> None:
        super().__init__()
        self._codec = codec
        self._copies: FlatCopies | None = None
        self._taken: WeightSource | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every copy; after `take` each is made as it is yielded, so that nothing waits for all of them."""
        taken, self._taken = self._taken, None
        if taken is not None:
            yield from self._copy(checked(taken, self.metas))
        else:
            yield from ((meta.name, self.tensors[meta.name]) for meta in self.metas)

    def fits(self, source: WeightSource) -> bool:
        return source.params() == self.metas

    def start(self, base: str, source: WeightSource) -> None:
        checkpoint, params = CheckpointSource(base), source.params()
        held = {meta.name: meta for meta in checkpoint.params()}
        for meta in params:
            if held.get(meta.name) != meta:
                raise ConfigError(
                    f"the base checkpoint holds {held.get(meta.name, f'no {meta.name}')}",
                    expected=str(meta),
                    hint="pass as base= the checkpoint from which this policy was loaded, or nothing",
                )
        self._be(params)
        self._files = checkpoint.files()
        pairs = ((meta, tensor) for meta, tensor in checked(checkpoint) if meta.name in self.table.number)
        for _ in self._copy(pairs):
            pass

    def take(self, source: WeightSource) -> None:
        self.version, self._taken = None, source
        self._be(source.params())
        self._files = source.files()

    def _be(self, params: tuple[ParamMeta, ...]) -> None:
        """Forget the copies, unless they are of these parameters."""
        if params != self.metas:
            self.table, self._copies, self.tensors = ParamTable.of(params), None, {}

    def write(self, delta: DeltaManifest, source: WeightSource, draft: Draft, prefix: str) -> DeltaManifest:
        self.version = None
        pairs = self._pairs(source)
        if isinstance(self._codec, FileEncoding):
            beside = ((name, self.tensors[name], tensor) for name, tensor in pairs)
            return write_files(delta, self._codec, differences(beside), self.tensors, draft, prefix)
        blocks = self._blocks(pairs, self._codec)
        return write_blocks(delta, BlockFiles(self.table), blocks, draft, prefix)

    def _blocks(self, pairs: Pairs, codec: BlockEncoding) -> Iterator[Coded]:
        """Yield what changed, coded; the copies follow."""

        def placed() -> Iterator[tuple[int, int, Tensor]]:
            (streams, segments), number = self.table.last_place, self.table.number
            for name, tensor in pairs:
                at = number[name]
                yield streams[at], segments[at], tensor

        olds = [] if self._copies is None else self._copies.bits
        then = partial(code, self.table, codec)
        return find(self.table, olds, placed(), then, threads=worker_threads(), follow=True)

    def _pairs(self, source: WeightSource) -> Pairs:
        """Return a pass over the tensors that may have changed."""
        if source.part is not None:
            return iter(source.pairs(source.part.names))
        return ((meta.name, tensor) for meta, tensor in checked(source, self.metas))

    def _copy(self, pairs: Iterable[tuple[ParamMeta, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        self.digests = np.zeros((len(self.metas), 2), DIGEST)
        streams, segments = self.table.last_place
        at, low, high, waiting = 0, 0, 0, 0  # the copies that are digested next: those of a stream, from one to another
        for meta, tensor in pairs:
            if self._copies is None:
                self._copies = FlatCopies(self.table, pinned=tensor.is_cuda)
                self.tensors = self._copies.by_name()
            copy, number = self.tensors[meta.name], self.table.number[meta.name]
            copy.copy_(tensor)
            if tensor.is_cuda:
                self.digests[number] = position_digest(tensor)
            else:
                stream, segment = streams[number], segments[number]
                if (stream, segment) != (at, high) or waiting > _DIGESTED:
                    self._see(at, low, high)
                    at, low, waiting = stream, segment, 0
                high, waiting = segment + 1, waiting + tensor.nbytes
            yield meta.name, copy
        self._see(at, low, high)

    def _see(self, stream: int, low: int, high: int) -> None:
        """Take the digests of the copies of some parameters of a stream."""
        if low == high:
            return
        assert self._copies is not None
        params = self.table.streams[stream].params[low:high]
        self.digests[params] = self._copies.words(stream, low, high)
