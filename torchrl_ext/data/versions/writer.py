"""The writing side of a chain: keyframes, deltas, and what is kept of them; every rank of a trainer writes its part."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from torchrl_ext.base.errors import StoreError
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.manifest import BLOCK, DIGEST, MANIFEST, DeltaManifest, Manifest, RunVersion, version_name
from torchrl_ext.data.versions.full import FullWriter
from torchrl_ext.data.versions.owned import Owned, Written
from torchrl_ext.data.weights.checkpoint import CheckpointSource
from torchrl_ext.data.weights.digests import digest_of
from torchrl_ext.data.weights.gather import Ranks
from torchrl_ext.data.weights.source import WeightSource

__all__ = ["ChainWriter"]

log = logging.getLogger("torchrl_ext")

_UNACKNOWLEDGED = 3  # keyframes that stay while no update succeeds


class ChainWriter:
    """Publishes one trainer's versions into a chain, as keyframes and deltas; its end on rank 0.

    Every rank owns some parameters (`torchrl_ext.data.versions.owned`), compares them with its copies, and writes its
    own files of a version. A version appears when rank 0 has written the manifest: only after all ranks have written.
    Where one fails, nothing does, and the next version is a full one.

    Args:
        chain: the versions, and this trainer's run.
        own: what rank 0 owns.
        keyframe_every: as in `DeltaTransport`.
        base: checkpoint directory on which the first version of an empty store is a delta.
        keep_files: never remove old versions.
        timeout_s: of each wait for another rank.
    """

    def __init__(
        self,
        chain: Chain,
        own: Owned,
        *,
        keyframe_every: int,
        base: str | None,
        keep_files: bool,
        timeout_s: float = 60.0,
    ) -> None:
        self._chain, self._own = chain, own
        self._keyframe_every, self._base, self._keep_files = keyframe_every, base, keep_files
        self._timeout_s = timeout_s
        self._version: RunVersion | None = None  # the version that the ranks' copies are
        self._digests = np.empty((0, 2), DIGEST)  # of all parameters of the newest version
        self._files: dict[str, bytes] = {}  # of the base
        self._begun = False
        self._since_keyframe, self._acknowledged = 0, True
        self.rank_bytes: tuple[int, ...] = ()

    def publish(self, source: WeightSource, version: int, ranks: Ranks | None = None) -> DeltaManifest | None:
        """Publish ``source`` as version ``version``, and return its delta; None for a keyframe without one.

        ``ranks`` are the trainer's others, if there are any; each of them writes what it owns. Where a part of the
        source alone may have changed since the version before (`WeightSource.part`), nothing else is looked at, and all
        else stays as it was.

        After an attempt that fails, which leaves nothing in the store, the next version is a keyframe. So it is after a
        version that not every engine acknowledged, since a delta on that one may be of no use; and where the version
        before is not in the store any more, which somebody emptied.

        Raises:
            StoreError: no space, no permission, no connection.
            ConfigError: the base checkpoint is not one of this model.
            ManifestError: the source does not yield what it declares, or ranks send other parameters.
            WeightSyncError: another rank failed, or did not answer.
        """
        ranks = ranks or Ranks()
        self._share(ranks, source)
        base = self._version
        if base is not None and not (base[1] < version and (base[1] == 0 or base[1] in self._chain.numbers())):
            base = None
        keyframe = base is None or not self._acknowledged or 0 < self._keyframe_every <= self._since_keyframe + 1
        if not self._acknowledged:
            self.acknowledge(keyframes=_UNACKNOWLEDGED)
        self._acknowledged, self._version, manifest = False, None, None
        files_of = self._own.full if isinstance(self._own.full, FullWriter) else None
        with self._chain.store.draft(version_name(version)) as draft:
            ranks.order("write", place=draft.place, delta=base is not None, keyframe=keyframe)
            own = self._own.write(source, draft, delta=base is not None, keyframe=keyframe)
            written = [own, *self._answers(ranks)]
            before, self._digests = self._digests, _summed(written)
            params, files, full = self._own.table.params, dict[str, int](), None
            if base is not None:
                manifest = self._delta(written, version, base, before)
                files |= manifest.files
            if keyframe:
                placed = {name: place for one in written for name, place in one.tensors.items()}
                sizes = {name: size for one in written for name, size in one.sizes.items()}
                if files_of is not None:
                    beside = {**self._files, **source.files()}
                    sizes = files_of.finish(draft, beside, version, params, placed, sizes)
                files |= sizes
                full = tuple(placed[meta.name] for meta in params)
            document = Manifest(
                version=version, run_id=self._chain.run_id, params=params, files=files, full=full, delta=manifest
            )
            draft.write(MANIFEST, document.to_bytes())
        self._chain.advance(version, keyframe=keyframe)
        self._version = self._chain.run_id, version
        self._since_keyframe = 0 if keyframe else self._since_keyframe + 1
        return manifest

    def _share(self, ranks: Ranks, source: WeightSource) -> None:
        """Share the parameters out, unless that was done for what the ranks hold."""
        ranks.order("look")
        same = self._own.look(source, alone=ranks.alone)
        if all([same, *(answer["same"] for answer in ranks.answers())]) and self._begun:
            return
        self._version, self._begun = None, False
        held = [] if ranks.alone else [self._own.held.to_json(), *ranks.ask("held")]
        owners = len(held) if held and self._chain.store.joined else 1  # others give rank 0 what they hold
        self._own.share(held, 0, owners, self._timeout_s)
        ranks.ask("share", held=held, owners=owners)
        if self._base is not None and self._chain.newest() == 0:  # only the first version of a store follows on it
            ranks.order("start", base=self._base)
            self._digests = _summed([self._own.start(self._base), *self._answers(ranks)])
            self._files = dict(CheckpointSource(self._base).files())
            self._version = "base", 0
        self._begun = True

    def _answers(self, ranks: Ranks) -> list[Written]:
        return [Written.from_json(one, f"what rank {rank} wrote") for rank, one in enumerate(ranks.answers(), 1)]

    def _delta(self, written: Sequence[Written], version: int, base: RunVersion, before: np.ndarray) -> DeltaManifest:
        """Return the manifest of what the ranks wrote."""
        kinds, files, rows = list[str](), dict[str, int](), list[np.ndarray]()
        for one in written:
            kinds += [kind for kind in one.kinds if kind not in kinds]
            own = np.frombuffer(one.blocks, BLOCK).copy()
            own["codec"] = np.array([kinds.index(kind) for kind in one.kinds], np.uint32)[own["codec"]]
            own["file"] += len(files)
            files |= one.files
            rows.append(own)
        self.rank_bytes = tuple(sum(one.files.values()) for one in written)
        return DeltaManifest(
            version=version,
            base_version=base[1],
            run_id=self._chain.run_id,
            base_run_id=base[0],
            codecs=tuple(kinds),
            files=files,
            table=self._own.table,
            changed=np.add.reduce([np.frombuffer(one.changed, DIGEST) for one in written]),
            digests=self._digests,
            base_digests=before[: None if base[1] == 0 else 0],
            blocks=np.concatenate(rows),
        )

    @property
    def digest(self) -> str:
        """Digest over the position digests of all tensors of the newest version."""
        text = self._digests.astype(">u8").tobytes().hex()
        return digest_of({meta.name: text[32 * at : 32 * at + 32] for at, meta in enumerate(self._own.table.params)})

    def restart(self) -> None:
        """Forget what was published, so that the next version is a full one, or a delta on the base checkpoint."""
        self._begun = False

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


def _summed(written: Sequence[Written]) -> np.ndarray:
    """Return the digests of all parameters: each rank has those of its own, and 0 elsewhere."""
    found: np.ndarray = np.add.reduce([np.frombuffer(one.digests, DIGEST) for one in written])
    return found.reshape(-1, 2)
