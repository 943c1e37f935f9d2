"""The writing side of a chain: keyframes, deltas, what is kept of them, and copies that deltas are taken against."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Protocol, final

import torch
import xxhash
from torch import Tensor

from torchrl_ext.codecs.base import Codec, Encoded
from torchrl_ext.codecs.pipeline import encode_tensors
from torchrl_ext.errors import ConfigError, StoreError
from torchrl_ext.stores import Store, version_name
from torchrl_ext.stores.base import Draft
from torchrl_ext.stores.chain import Chain
from torchrl_ext.stores.manifest import DeltaManifest, Manifest
from torchrl_ext.stores.versions import BESIDE, Held
from torchrl_ext.types import ParamMeta
from torchrl_ext.versions.containers import NewDelta
from torchrl_ext.weights.checkpoint import CheckpointSource
from torchrl_ext.weights.digests import PositionDigest, position_digest
from torchrl_ext.weights.source import WeightSource, checked

__all__ = ["Baseline", "ChainWriter", "Copies", "WritesFull"]

log = logging.getLogger("torchrl_ext")

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
        codec: the encoding of deltas.
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
        codec: Codec,
        full: WritesFull,
        keyframe_every: int,
        base: str | None,
        keep_files: bool,
        checksum: str = "xxh3-128",
        baseline: Callable[[], Baseline] | None = None,
    ) -> None:
        self._store, self._chain, self._run_id = store, chain, run_id
        self._codec, self._full, self._checksum = codec, full, checksum
        self._keyframe_every, self._base, self._keep_files = keyframe_every, base, keep_files
        self._baseline: Baseline | None = None
        self._new_baseline = Copies if baseline is None else baseline
        self._since_keyframe, self._acknowledged = 0, True

    def publish(self, source: WeightSource, version: int, *, keyframe: bool = False) -> DeltaManifest | None:
        """Publish ``source`` as version ``version``, and return its delta; None for a keyframe without one.

        It is a keyframe where ``keyframe`` says so, or one is due. Where a part of the source alone may have changed
        since the version before (`WeightSource.part`), nothing else is looked at, and all else stays as it was.

        After an attempt that fails, which leaves nothing in the store, the next version is a keyframe. So it is after a
        version that not every engine acknowledged, since a delta on that one may be of no use.

        Raises:
            StoreError: no space, no permission, no connection.
            ConfigError: the base checkpoint is not one of this model.
            ManifestError: the source does not yield what it declares.
        """
        baseline = self._baseline or self._first_baseline(source)
        base = baseline.version if baseline.fits(source) else None
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
                    delta = NewDelta(
                        version=version,
                        base=base,
                        run_id=self._run_id,
                        codec=self._codec,
                        params=source.params(),
                        tensors=baseline.tensors,
                        digests=baseline.digests,
                        base_digests=_in_hex(baseline.digests) if base[1] == 0 else {},
                        checksum=self._checksum,
                    )
                    manifest = baseline.write(delta, source, draft, f"{BESIDE}/" if keyframe else "")
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
    def rank_bytes(self) -> tuple[int, ...]:
        """Bytes that each trainer rank wrote of the last delta, in order of rank; empty where one rank writes all."""
        return () if self._baseline is None else self._baseline.rank_bytes

    def restart(self) -> None:
        """Forget what was published, so that the next version is a full one, or a delta on the base checkpoint."""
        self._baseline = None

    def renew(self) -> None:
        """Make the next version a keyframe, for readers that hold neither the base nor a version of this chain."""
        self._acknowledged = False

    def acknowledge(self, oldest: int | None = None, *, keyframes: int = 1) -> None:
        """Note that every engine has the version that was published last, and collect old ones.

        Args:
            oldest: what engines may still read; not looked at, since readers under way have leases.
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
            for name, digest in sorted(_in_hex(baseline.digests).items()):
                hasher.update(f"{name}\0{digest}\n".encode())
            baseline.version = (f"base-{hasher.hexdigest()}", 0)
        self._baseline = baseline
        return baseline


def _in_hex(digests: Mapping[str, PositionDigest]) -> dict[str, str]:
    return {name: digest.hex() for name, digest in digests.items()}


class Baseline(WeightSource):
    """What the newest version is, against which the next delta is taken; as a source it is what a keyframe holds.

    While a version is being made it is neither the old one nor the new one: `version` is None then, and stays so when
    the attempt fails. The next version is a full one in that case, which takes everything anew.

    Attributes:
        metas: the parameters, in order.
        tensors: copies of them by name, as far as this process has them.
        digests: their position digests.
        version: run id and number of the version that they are.
        rank_bytes: bytes that each trainer rank wrote of the last delta, in order of rank, where several ranks write.
    """

    def __init__(self) -> None:
        self.metas: tuple[ParamMeta, ...] = ()
        self.tensors: dict[str, Tensor] = {}
        self.digests: dict[str, PositionDigest] = {}
        self.version: Held | None = None
        self.rank_bytes: tuple[int, ...] = ()
        self._files: Mapping[str, bytes] = {}

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
    def write(self, delta: NewDelta, source: WeightSource, draft: Draft, prefix: str) -> DeltaManifest:
        """Write the files of a delta, the manifest last, and become what ``source`` is now.

        Args:
            delta: what is to be written.
            source: the new tensors.
            draft: where files are written.
            prefix: of their names there.
        """


@final
class Copies(Baseline):
    """Copies of every tensor of the newest version.

    Args:
        device: where the copies are; by default on the host, pinned where the source's tensors are on a GPU.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        self._device = device
        self._finite: set[str] = set()  # copies that are known to be
        self._taken: WeightSource | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every copy; after `take` each is made as it is yielded, so that nothing waits for all of them."""
        taken, self._taken = self._taken, None
        if taken is not None:
            yield from self._copy(checked(taken, self.metas), taken)
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
        self.metas, self._files = params, checkpoint.files()
        wanted = {meta.name for meta in params}
        pairs = ((meta, tensor) for meta, tensor in checked(checkpoint) if meta.name in wanted)
        for _ in self._copy(pairs, checkpoint):
            pass

    def take(self, source: WeightSource) -> None:
        self.version, self._taken = None, source
        self.metas, self._files = source.params(), source.files()

    def write(self, delta: NewDelta, source: WeightSource, draft: Draft, prefix: str) -> DeltaManifest:
        self.version = None
        return delta.write(self._changes(source, delta.codec), draft, prefix)

    def _changes(self, source: WeightSource, codec: Codec) -> Iterator[Encoded]:
        looks = source.look is not None
        for change in encode_tensors(self._beside(source), codec, follow=True, look=looks):
            name = change.meta.name
            if not change.finite or name not in self._finite:
                self._look(source, name, self.tensors[name])
            yield change

    def _look(self, source: WeightSource, name: str, tensor: Tensor) -> None:
        """Look for NaN and infinity in all of a tensor, where somebody wants to know of them."""
        self._finite.discard(name)
        found = None if source.look is None else source.look(name, tensor, None)
        if found is not None and found.item() == 0.0:
            self._finite.add(name)

    def _beside(self, source: WeightSource) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield each name with its copy and the new tensor; the caller has to make the copy equal to it."""
        if source.part is not None:
            for name, tensor in source.pairs(source.part.names):
                yield name, self.tensors[name], tensor
            return
        for meta, tensor in checked(source, self.metas):
            yield meta.name, self.tensors[meta.name], tensor

    def _copy(self, pairs: Iterable[tuple[ParamMeta, Tensor]], source: WeightSource) -> Iterator[tuple[str, Tensor]]:
        known, self.tensors, self.digests = self.tensors, {}, {}
        for meta, tensor in pairs:
            copy = known.pop(meta.name, None)
            if copy is None or ParamMeta.of(meta.name, copy) != meta:
                pinned = self._device is None and tensor.is_cuda
                copy = torch.empty(meta.shape, dtype=meta.dtype, device=self._device or "cpu", pin_memory=pinned)
            copy.copy_(tensor)
            self._look(source, meta.name, tensor)
            self.tensors[meta.name] = copy
            self.digests[meta.name] = position_digest(tensor if tensor.is_cuda else copy)
            yield meta.name, copy
