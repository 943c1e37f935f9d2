"""The reading of chains that slime wrote, in either of its formats, which have no manifest of ours.

`torchrl_ext.compat.slime.current` and `torchrl_ext.compat.slime.first` have the formats. There are no digests
of what a delta leaves alone. Current files carry a checksum of each new tensor; the first ones only one of their own
bytes, and nothing names their base but the number before them.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing, suppress
from typing import final

import numpy as np
import xxhash

from torchrl_ext.codecs.base import make_codec
from torchrl_ext.compat.slime.current import CHECKSUMS, INDEX_NAME, DeltaIndex, parse_index
from torchrl_ext.compat.slime.first import flush_name
from torchrl_ext.errors import ConfigError, IntegrityError, ManifestError
from torchrl_ext.stores import Chain, LocalStore, Manifest, Placed, Store, version_name
from torchrl_ext.stores.delta_manifest import DIGEST, DeltaManifest, Placing
from torchrl_ext.stores.manifest import MANIFEST
from torchrl_ext.stores.table import ParamTable
from torchrl_ext.stores.versions import Held, Version, read_version
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.checkpoint import CheckpointSource
from torchrl_ext.weights.tensorfile import TensorFile

__all__ = ["ForeignVersions"]

SETTLE_S = 2.0
"""How long nothing may change in the newest folder of the first format until it counts as complete, in seconds."""

_DONE = "DONE"
_RUN = "foreign-"
_LONE = "model.safetensors"
_FLUSH = re.compile(r"rank(\d{1,9})_flush(\d{1,9})\.safetensors")


@final
class ForeignVersions:
    """Reads the versions that slime wrote, as a `torchrl_ext.stores.versions.ChainView`.

    With an index, a version is complete when every file that it names is there. The first format has no last file: its
    writer begins a version when it is done with the one before, and its documentation promises a file ``DONE``. A
    version without changes is an empty folder there. A reader that polls would see a version only when the next one
    begins, and so may take a folder that settled; files that come into it later make it another version.

    Args:
        store: where they are.
        base: the checkpoint directory that everything began with, if there is one.
        settles: the newest folder of the first format counts when nothing changed in it for `SETTLE_S` seconds. That
            depends on when one looks, so it is not for several workers that have to land the same version.
    """

    def __init__(self, store: Store, base: str | None = None, *, settles: bool = False) -> None:
        self._store, self._base, self._settles = store, base, settles
        self._seen: tuple[object, float] = None, 0.0  # what the newest folder held, and since when
        self._settled: tuple[int, frozenset[tuple[str, int]]] = 0, frozenset()
        self._parts: tuple[int, dict[str, int], dict[str, int]] = -1, {}, {}  # a version, its part to read, what landed

    def is_part(self, name: str) -> bool:
        return _FLUSH.fullmatch(name) is not None

    def expect(self, number: int, files: Collection[str] | None, held: Held | None) -> bool:
        _, _, landed = self._parts
        self._parts = -1, {}, {}
        if files is None:
            return False
        part = self._sizes(number, files)
        again = held == (_run(landed), number) and all(landed.get(name, size) == size for name, size in part.items())
        self._parts = number, part, {**(landed if again else {}), **part}
        return again

    def latest(self) -> int:
        for number in reversed(Chain(self._store).numbers()):
            with suppress(FileNotFoundError):
                if self._finished(number):
                    return number
        return 0

    def read(self, number: int, known: dict[int, Version]) -> None:
        below: list[tuple[int, int | None]] = []  # versions of the format, with their bases: deltas name what changes
        at = number
        while at not in known:
            if at != number:
                with suppress(FileNotFoundError):
                    known[at] = read_version(self._store, at)
                    break
            try:
                base = self._base_of(at)
            except FileNotFoundError as error:
                if at == number:
                    raise
                raise IntegrityError(
                    f"{version_name(at)} in {self._store.url}, to which version {number} leads back, is missing",
                    state="nothing was read",
                ) from error
            below.append((at, base))
            if not base:
                break
            at = base
        for at, base in reversed(below):
            known[at] = self._read(at, known[base].params if base else None)

    def replaced(self, number: int, run_id: str) -> bool:
        if not run_id.startswith(_RUN):
            return False
        names, index, where = self._look(number)
        if index is not None:
            return _run(self._sizes(number, {*index.weight_map.values()}), index.to_bytes()) != run_id
        if where is not None or _LONE in names:
            return self._run_of_full(number, where) != run_id
        if not _flushes(names) or _run(self._sizes(number, _flushes(names))) == run_id:
            return False
        self._base_of(number)  # raises where a part is missing
        return self._over(number, names) or self._quiet(number, names)

    def _finished(self, number: int) -> bool:
        names, _, where = self._look(number)
        if where is not None:
            return names.issuperset(where.values())
        settled, files = self._settled
        if number == settled and files <= self._store.sizes(version_name(number)).items():
            return True  # a reader that has it goes back to no older one while more comes
        return self._base_of(number) is None or self._over(number, names) or self._quiet(number, names)

    def _base_of(self, number: int) -> int | None:
        if number == self._parts[0]:
            return number - 1
        names, index, where = self._look(number)
        if where is not None or _LONE in names:
            return None if index is None else index.base_version
        flushes, lacks = _flushes(names), _lacks(names)
        if lacks is None and (flushes or self._unchanged(number, names)):
            return number - 1
        raise self._unfinished(number, lacks, over=bool(flushes) and self._over(number, names))

    def _read(self, number: int, params: tuple[ParamMeta, ...] | None) -> Version:
        folder, (names, index, where) = version_name(number), self._look(number)
        if index is None and (where is not None or _LONE in names):
            full = self._full(number, folder, where)
            return Version(run_id=full.run_id, params=tuple(row.meta for row in full.params), full=full)
        if params is None and self._base is None:
            raise ConfigError(
                f"the versions in {self._store.url} build on a checkpoint that is not among them",
                hint="name the directory of the checkpoint that their trainer started from (base=, or --base on the "
                "command line)",
            )
        params = CheckpointSource(str(self._base)).params() if params is None else params
        if index is not None:
            self._check(index, params, f"{self._store.url}/{folder}/{INDEX_NAME}")
        places = {} if index is None else index.weight_map
        files = self._sizes(number, set(places.values()) if index is not None else _flushes(names))
        announced = dict[str, int]()
        if number == self._parts[0]:
            _, files, announced = self._parts
        delta = DeltaManifest(
            version=number,
            base_version=number - 1 if index is None else index.base_version,
            run_id=_run(announced or files, b"" if index is None else index.to_bytes()),
            base_run_id="",  # any version with the number
            container="flushes" if index is None else "whole",
            codecs=() if index is None else (make_codec(index.delta_encoding).to_json(),),
            files=files,
            table=ParamTable.of(params),
            changed=np.array([meta.name in places for meta in params], DIGEST),  # how much is not known
            digests=np.empty((0, 2), DIGEST),
            placed={name: Placing(file, index.checksum_format) for name, file in places.items()} if index else {},
        )
        return Version(run_id=delta.run_id, params=params, delta=delta, folder=folder)

    def _check(self, index: DeltaIndex, params: tuple[ParamMeta, ...], where: str) -> None:
        """Check that the delta of an index can be read, and is one of a model with these parameters."""
        encoding, compression, kind = index.delta_encoding, index.compression_format, index.checksum_format
        if encoding not in ("xor", "overwrite") or compression != "zstd" or kind not in CHECKSUMS:
            raise ManifestError(
                f"{where} is coded as {encoding!r} in {compression!r}, with checksums {kind!r}",
                expected=f"'xor' or 'overwrite' in 'zstd', with checksums {', '.join(CHECKSUMS)}",
            )
        lost = min(index.weight_map.keys() - {meta.name for meta in params}, default=None)
        if lost is not None:
            raise ManifestError(f"{where} changes tensor {lost!r}, which its base has not", state="nothing was read")

    def _look(self, number: int) -> tuple[frozenset[str], DeltaIndex | None, Mapping[str, str] | None]:
        """Return the names in a folder, and from its index what it says of a delta, and the file of each tensor."""
        names = frozenset(self._store.list(version_name(number)))
        if MANIFEST in names:  # it is one of ours
            raise FileNotFoundError(f"{self._store.url}/{version_name(number)}")
        if INDEX_NAME not in names:
            return names, None, None
        key = f"{version_name(number)}/{INDEX_NAME}"
        index, files = parse_index(self._store.get(key), f"{self._store.url}/{key}")
        if index is not None and (index.version != number or index.base_version >= number):
            raise IntegrityError(
                f"{self._store.url}/{key} says that it is version {index.version}, with version {index.base_version} "
                "as its base",
                expected=f"version {number}, and a base before it",
                state="nothing was read",
            )
        return names, index, files

    def _sizes(self, number: int, names: Collection[str]) -> dict[str, int]:
        """Return the bytes of files of a version, by name; all of them have to be there."""
        sizes = self._store.sizes(version_name(number))
        lost = min((name for name in names if name not in sizes), default=None)
        if lost is not None:
            raise self._unfinished(number, f"{lost} is missing", over=self._followed(number))
        return {name: sizes[name] for name in sorted(names)}

    def _unfinished(self, number: int, lacks: str | None, *, over: bool) -> Exception:
        """Return the error for a version that lacks a file: it is damaged where its writer is done with it."""
        where = f"{self._store.url}/{version_name(number)}"
        if not over:
            return FileNotFoundError(where if lacks is None else f"{where}: {lacks}")
        return IntegrityError(
            f"{where} was left unfinished: {lacks}",
            expected="every file of a version that another one follows, and flush files counted from 0 on each rank",
            state="nothing was read",
            hint="let the trainer publish a full version",
        )

    def _followed(self, number: int) -> bool:
        return any(other > number for other in Chain(self._store).numbers())

    def _over(self, number: int, names: Collection[str]) -> bool:
        """Return whether the writer is done with a version of the first format."""
        return _DONE in names or self._followed(number)

    def _quiet(self, number: int, names: frozenset[str]) -> bool:
        """Return whether a folder of flush files settled, by the times of its files or since this looked first."""
        if not self._settles or not _flushes(names):
            return False
        folder, now_s = version_name(number), time.monotonic()
        files, changed_s = frozenset(self._store.sizes(folder).items()), _changed_at(self._store, folder)
        if self._seen[0] != (number, files, changed_s):
            self._seen = (number, files, changed_s), now_s
        quiet = now_s - self._seen[1] >= SETTLE_S
        quiet = quiet or (changed_s is not None and time.time() - changed_s >= SETTLE_S)
        if quiet:
            self._settled = number, frozenset((name, size) for name, size in files if _FLUSH.fullmatch(name))
        return quiet

    def _unchanged(self, number: int, names: frozenset[str]) -> bool:
        """Return whether a folder is an unchanged version: empty, complete, and between others of the first format."""
        numbers = Chain(self._store).numbers()
        if names - {_DONE} or number not in numbers or not self._over(number, names):
            return False
        sides = [other for other in numbers if other > number], [other for other in numbers[::-1] if other < number]
        held = ((frozenset(self._store.list(version_name(other))) - {_DONE} for other in side) for side in sides)
        nearest = (next(filter(None, folders), frozenset[str]()) for folders in held)
        return any(_flushes(names) and MANIFEST not in names for names in nearest)

    def _full(self, number: int, folder: str, where: Mapping[str, str] | None) -> Manifest:
        """Return the manifest of a checkpoint; ``where`` says which file holds which tensor, if it has an index."""
        placed: dict[str, Placed] = {}
        run_id = self._run_of_full(number, where)  # before it is read: what is replaced meanwhile is read again
        files = self._sizes(number, {_LONE} if where is None else {*where.values()})
        for name in files:
            with closing(TensorFile(self._store.open(f"{folder}/{name}"))) as file:
                file.no_payloads()
                files[name] = file.nbytes
                placed |= {meta.name: Placed(meta=meta, file=name, checksum="") for meta in file.params()}
        for tensor, name in (where or {}).items():
            if tensor not in placed or placed[tensor].file != name:
                raise IntegrityError(
                    f"{self._store.url}/{folder}/{name} does not hold {tensor!r}, as the index says",
                    state="nothing was read",
                )
        if not placed:
            raise IntegrityError(f"{self._store.url}/{folder} is a full version without tensors")
        return Manifest(version=number, run_id=run_id, params=tuple(placed.values()), files=files)

    def _run_of_full(self, number: int, where: Mapping[str, str] | None) -> str:
        """Return the run id of a checkpoint by the sizes and the stamps of its files, which name no version."""
        files = self._sizes(number, {_LONE} if where is None else {*where.values()})
        stamps = [self._store.stamp(f"{version_name(number)}/{name}") for name in files]
        return _run(files, repr(stamps).encode())


def _changed_at(store: Store, folder: str) -> float | None:
    """Return when anything directly under ``folder`` changed last, in seconds since 1970; None if that is not known."""
    if not isinstance(store, LocalStore):
        return None
    try:
        with os.scandir(store.root / folder) as entries:
            changed = [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
        return max(*changed, os.stat(store.root / folder).st_mtime) if changed else None
    except OSError:  # some file went meanwhile, say
        return None


def _flushes(names: Iterable[str]) -> list[str]:
    return [name for name in names if _FLUSH.fullmatch(name)]


def _lacks(names: Collection[str]) -> str | None:
    """Return what a folder of flush files lacks, as far as that can be seen; None where it seems complete."""
    numbers: dict[str, set[int]] = {}
    for rank, number in (match.groups() for match in map(_FLUSH.fullmatch, names) if match):
        numbers.setdefault(rank, set()).add(int(number))
    for rank, found in sorted(numbers.items()):
        gap = next((number for number in range(len(found)) if number not in found), None)
        if gap is not None:
            return f"{flush_name(int(rank), gap)} is missing"
    partly = min((name for name in names if name.endswith(".tmp")), default=None)
    return None if partly is None else f"{partly} stayed"


def _run(files: Mapping[str, int], index: bytes = b"") -> str:
    """Return a run id that tells a version from another one that had its number before."""
    return f"{_RUN}{xxhash.xxh3_64_hexdigest(repr(sorted(files.items())).encode() + index)}"
