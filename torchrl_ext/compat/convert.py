"""The writing of a chain anew, in the layout of this library or of another one that follows versions as files.

Every version is rebuilt and compared with its digests first, so that nothing damaged is passed on; a delta is taken
anew between two of them.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, final

from torch import Tensor

from torchrl_ext.codecs.base import Encoded, make_codec
from torchrl_ext.codecs.pipeline import encode_tensors
from torchrl_ext.compat.skyrl.deltas import delta_files, delta_name, holds_deltas, read_versions
from torchrl_ext.compat.slime.containers import Flushes, Whole
from torchrl_ext.errors import ConfigError
from torchrl_ext.stores import Chain, LocalStore, Store, version_name
from torchrl_ext.stores.base import Draft
from torchrl_ext.stores.manifest import MANIFEST
from torchrl_ext.types import Info, ParamMeta
from torchrl_ext.versions.checkpoint_writer import FullWriter
from torchrl_ext.versions.containers import OtherDelta
from torchrl_ext.versions.others import Reader
from torchrl_ext.versions.writer import ChainWriter, Copies
from torchrl_ext.weights.checkpoint import CheckpointSource, companion_files
from torchrl_ext.weights.source import WeightSource

__all__ = ["LAYOUTS", "Rebuilt", "convert", "rebuilt"]

_SHARD_BYTES: Final = 4 << 30


@final
@dataclass(frozen=True, kw_only=True)
class Rebuilt(WeightSource):
    """One version of a chain, whole in memory.

    Attributes:
        number: the version.
        whole: the chain has it whole; else as a delta only.
        tensors: on the host, by name, in order. Read before the next version is asked for.
        beside: files that complete a checkpoint of it: name -> content.
    """

    number: int
    whole: bool
    tensors: Mapping[str, Tensor]
    beside: Mapping[str, bytes] = field(default_factory=dict)

    def params(self) -> tuple[ParamMeta, ...]:
        return tuple(ParamMeta.of(name, tensor) for name, tensor in self.tensors.items())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())

    def files(self) -> Mapping[str, bytes]:
        return self.beside


class _Layout(NamedTuple):
    """How versions lie in a root of another library.

    Attributes:
        encoding: of deltas.
        files: yields name and content of each file of a delta, and maybe more.
        folder: the name of a version's directory.
        last: an empty file that ends every version; none where "".
        deltas_only: there are no full versions, and no number is left out.
    """

    encoding: str
    files: Callable[[OtherDelta, Iterable[Encoded]], Iterator[tuple[Any, ...]]]
    folder: Callable[[int], str] = version_name
    last: str = ""
    deltas_only: bool = False


_FOREIGN: Final = {
    "slime": _Layout("xor", Whole().files),
    "slime-first": _Layout("deltas_zstd", Flushes().files, last="DONE"),
    "skyrl": _Layout("xor", delta_files, delta_name, deltas_only=True),
}

LAYOUTS: Final = ("ours", *_FOREIGN)
"""The layouts that `convert` writes; ``slime-first`` is slime's format of June 2026 and before."""


def rebuilt(reader: Reader) -> Iterator[Rebuilt]:
    """Yield every version under a root; ours and slime's by the delta on the one before, where that takes fewer bytes.

    Raises:
        ConfigError: a version leads back to a checkpoint that is not among the versions, and the reader has no base.
        IntegrityError: something is damaged.
    """
    files = {} if reader.base is None else companion_files(reader.base)
    if holds_deltas(reader.store):
        for number, tensors in read_versions(reader.store, reader.base):
            yield Rebuilt(number=number, whole=False, tensors=tensors, beside=files)
        return
    follower, names = reader.follower(keep=True), list[str]()
    for number in reader.numbers():
        for _ in follower.tensors(reader.route(number, follower), {}):
            pass
        whole, held = reader.chain.version(number).full is not None, follower.mirror
        names = names if held.keys() == set(names) else [*held]
        files = reader.beside(number) if whole else files
        yield Rebuilt(number=number, whole=whole, tensors={name: held[name] for name in names}, beside=files)


def convert(versions: Iterable[Rebuilt], folder: str | os.PathLike[str], layout: str, base: str | None) -> list[Info]:
    """Write versions into a new directory.

    What the chain has whole is written whole, and so is a version that does not follow on the one before it. All else
    is written as a delta on the version before, the first one on ``base``. SkyRL has no whole versions: there all are
    deltas. Memory for the model is taken once, beside ``versions``.

    Args:
        versions: in order.
        folder: a directory that does not exist, or is empty.
        layout: one of `LAYOUTS`.
        base: checkpoint directory that is version 0.

    Returns:
        A row for each version: its number as ``version``, its ``kind`` (``"keyframe"``, ``"delta"``, or in our layout
        ``"keyframe+delta"``) and its ``bytes``.

    Raises:
        ConfigError: the layout cannot take a version, or the directory is not empty; what was written stays.
        StoreError: no space, no permission.
    """
    path = Path(os.path.abspath(folder))
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} exists already", expected="a new or empty directory", state="nothing was written")
    if layout != "ours" and _FOREIGN[layout].deltas_only and base is None:
        raise ConfigError(
            f"layout {layout!r} has no full versions: every version builds on a checkpoint",
            expected="the checkpoint that its engines start with",
            state="nothing was written",
            hint="name its directory with --base",
        )
    store = LocalStore(path)
    store.own()
    try:
        if layout == "ours":
            rows = list(_as_ours(store, versions, base))
        else:
            rows = list(_Writer(store, _FOREIGN[layout], base).write(versions))
    finally:
        store.disown()
    for row in rows:
        files = (path / row.pop("folder")).rglob("*")
        row["bytes"] = sum(file.stat().st_size for file in files if file.is_file())
    return rows


def _as_ours(store: Store, versions: Iterable[Rebuilt], base: str | None) -> Iterator[Info]:
    writer, codec = None, make_codec("auto")
    for version in versions:
        writer = writer or ChainWriter(
            store,
            Chain(store),
            uuid.uuid4().hex,
            container=codec.container,
            full=FullWriter(_SHARD_BYTES),
            keyframe_every=0,
            base=None if version.whole else base,
            keep_files=True,
            baseline=partial(Copies, codec),
        )
        delta = writer.publish(version, version.number, keyframe=version.whole)
        writer.acknowledge()
        kind = "keyframe" if delta is None else "keyframe+delta" if version.whole else "delta"
        yield {"version": version.number, "kind": kind, "folder": version_name(version.number)}


@final
class _Writer:
    """Writes a root in the layout of another library.

    Args:
        store: the root, which is owned.
        layout: how versions lie there.
        base: checkpoint directory that is version 0.
    """

    def __init__(self, store: Store, layout: _Layout, base: str | None) -> None:
        self._store, self._layout = store, layout
        self._codec = make_codec(layout.encoding)
        self._held: dict[str, Tensor] = {}
        self._number: int | None = None
        if base is not None:
            self._number, self._base = 0, CheckpointSource(base)
        self._readable = False  # whether readers would take a folder without files for a version

    def write(self, versions: Iterable[Rebuilt]) -> Iterator[Info]:
        """Write every version, and yield what it became."""
        for version in versions:
            folder = self._layout.folder(version.number)
            with self._store.draft(folder) as draft:
                delta = self._follows(version) and self._delta(draft, version)
                if not delta:
                    self._whole(draft, version)
                if self._layout.last:
                    draft.write(self._layout.last, b"")
            self._number = version.number
            yield {"version": version.number, "kind": "delta" if delta else "keyframe", "folder": folder}

    def _follows(self, version: Rebuilt) -> bool:
        """Return whether a version is to be a delta on what is held; reads the base where that is first.

        Raises:
            ConfigError: it has to be one, and cannot.
        """
        must = self._layout.deltas_only
        if self._number != version.number - 1:
            if must:
                raise ConfigError(
                    f"version {version.number} follows on version {self._number} here",
                    expected=f"version {version.number - 1}: this layout numbers versions from the base on, without "
                    "gaps",
                    hint="convert a root that has all versions since the first (keep_files=True)",
                )
            return False
        if version.whole and not must:
            return False
        if self._number == 0:
            wanted = version.tensors.keys()
            self._held = {name: tensor.clone() for name, tensor in self._base if name in wanted}
        held = {name: ParamMeta.of(name, tensor) for name, tensor in self._held.items()}
        other = next((meta for meta in version.params() if held.get(meta.name) != meta), None)
        if other is not None and (must or self._number == 0):
            raise ConfigError(
                f"version {self._number} holds {held.get(other.name, f'no {other.name}')}",
                expected=str(other),
                hint="pass as --base the checkpoint that the trainer started from",
            )
        return other is None

    def _delta(self, draft: Draft, version: Rebuilt) -> bool:
        """Write a delta; return False where this layout could not tell it from a version that is being written."""
        params, wrote = version.params(), False
        new = OtherDelta(version.number, version.number - 1, self._codec.name, version.tensors)
        pairs = ((meta.name, self._held[meta.name], version.tensors[meta.name]) for meta in params)
        for name, data, *_ in self._layout.files(new, encode_tensors(pairs, self._codec, follow=True)):
            draft.write(name, data)
            wrote = self._readable = True
        return wrote or self._readable

    def _whole(self, draft: Draft, version: Rebuilt) -> None:
        FullWriter(_SHARD_BYTES).write(draft, version, version.number, "")
        os.unlink(draft.path / MANIFEST)  # which is ours
        self._held, self._readable = {name: tensor.clone() for name, tensor in version}, False
