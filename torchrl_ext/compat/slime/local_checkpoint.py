"""A checkpoint on an engine's host that follows published versions, as the engines of slime and vime keep one.

slime's layout (THUDM/slime at 474861aaf, its patch of SGLang; vime has the same): a plain checkpoint directory, beside
whose files lies ``.weight_sync/`` with

    lock         held (flock) by whoever changes the directory
    state.json   which version the files are: {"version": "000005"}

``state.json`` goes before the first byte changes and comes back when the last one is durable, so it never stands beside
files that are not what it says: without it, slime's readers and this one copy a whole version first. Ours has more
fields, which slime's reader passes over: the run that published the version, what tells a full version from one that
replaced it, and the base checkpoint.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, final

import torch
from torch import Tensor

from torchrl_ext.codecs.patch import apply_patch
from torchrl_ext.compat.slime.current import INDEX_NAME, parse_index
from torchrl_ext.compat.slime.foreign import ForeignVersions
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError, IntegrityError, ManifestError, StoreError
from torchrl_ext.files import open_regular
from torchrl_ext.stores import Chain, Manifest, Store, open_store, version_name
from torchrl_ext.stores.manifest import MANIFEST
from torchrl_ext.stores.opening import admit
from torchrl_ext.stores.versions import Held, Version
from torchrl_ext.types import ParamMeta
from torchrl_ext.versions.checkpoint_reader import PublishedVersion
from torchrl_ext.versions.open_route import OpenRoute
from torchrl_ext.weights.tensorfile import CHUNK_BYTES, TensorFile

__all__ = ["LocalCheckpoint"]

log = logging.getLogger("torchrl_ext")

_SYNC: Final = ".weight_sync"
_STATE: Final = "state.json"
_LONE: Final = "model.safetensors"
_TAKEN: Final = (".safetensors", ".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".spm")
"""Endings of files that are taken over from a published version, and none that a shell, say, would look for."""
_LOCK_S: Final = 3600.0  # other workers of the host may copy a large model meanwhile


@final
class LocalCheckpoint:
    """A checkpoint directory on this host, brought to a published version in place. Several processes may share it.

    Args:
        directory: made where it is missing. One that has files and was never brought to a version here is refused, as
            what a version does not have is removed.
        base: the checkpoint directory that is version 0; None, or what is no directory, where there is none.
    """

    def __init__(self, directory: str | os.PathLike[str], base: str | os.PathLike[str] | None = None) -> None:
        self._named, self.directory = os.fspath(directory), Path(os.path.abspath(directory))
        self._base = None if base is None or not os.path.isdir(base) else os.path.realpath(base)
        self._sync = self.directory / _SYNC

    @property
    def version(self) -> int | None:
        """The version that the files are; None where that is not known: none yet, or a change was interrupted."""
        held = self._held()
        return None if held is None else held[0][1]

    def pull(
        self,
        source: str,
        version: int,
        *,
        before: Callable[[str, int], None] | None = None,
        timeout_s: float = _LOCK_S,
    ) -> None:
        """Bring the files to a version: in place by what changed, else by a copy of a full one and the deltas after it.

        What the directory holds counts only where ``source`` does not say that another run published it.

        Args:
            source: the directory or URL under which versions lie, ``weight_v000005`` and so on.
            version: its number; 0 is the base.
            before: called with source and version before anything is read, unless the version is 0; for mounts that
                have to be told to look again.
            timeout_s: how long to wait for others who change the directory, in seconds.

        Raises:
            ConfigError: directories that this engine may not open, or that cannot go together; or there is no base.
            DeadlineError: others did not get done in time.
            StoreError: there is no such version; the directory cannot be written.
            IntegrityError: damaged files, or no route from what is there to the version.
            ManifestError: a delta belongs to another model.
        """
        self._refuse(source)
        if version and before is not None:
            before(source, version)
        with self._locked(timeout_s):
            store, held = open_store(source), self._held()
            if held is not None and held[1] and (now := _stamp(store, held[0][1])) and now != held[1]:
                held = None  # another full version has the number now
            start = None if held is None else held[0]
            try:
                try:
                    self._bring(store, version, start)
                except (IntegrityError, ManifestError) as error:
                    if start is None:
                        raise
                    log.warning("%s is copied anew: %s", self.directory, error)
                    self._bring(store, version, None)
            except FileNotFoundError as error:
                raise StoreError(
                    f"{source} holds no complete version {version}, or not all that leads to it: {error}",
                    expected="every file of a version before it is asked for",
                    state=f"{self.directory} is as it was, or is copied anew by the next call",
                ) from error
            except OSError as error:
                raise StoreError(
                    f"{self.directory} cannot be written: {error}",
                    state="the next call copies it anew",
                    hint="name a directory on a local disk with room for the model",
                ) from error

    def _bring(self, store: Store, version: int, held: Held | None) -> None:
        """Bring the files from version ``held`` to ``version``; from any state where it is None."""
        if version == 0:
            if held is None or held[1]:
                base = self._known_base()
                self._seed(base, _plain(base), None)
                self._settle("", 0, None)
            return
        chain = Chain(store, view=ForeignVersions(store, self._base))
        if held is not None and held[1] and not store.list(version_name(held[1])):  # it says no more what it was
            chain.known[held[1]] = Version(run_id=held[0], params=tuple(meta for meta, _ in self._places().values()))
        try:
            route = chain.route(version, held, based=self._base is not None)
        except (ConfigError, IntegrityError):
            if self._base is None:
                self._known_base(f"version {version} of {store.url} cannot be reached without its base, and ")
            raise
        keyframe = route.keyframe
        start = route.start if keyframe is None else (keyframe.run_id, keyframe.version)
        kept = keyframe is None and held is not None and start is not None and held[1] == start[1]
        with chain.leased(route.first):
            opened = OpenRoute(
                chain,
                replace(route, keyframe=None, start=start),
                version,
                partial(PublishedVersion, store),
                start,
                None,
            )
            if keyframe is not None:
                names = [name for name in store.sizes(version_name(keyframe.version)) if _is_taken(name)]
                with store.local(version_name(keyframe.version), names) as path:
                    self._seed(str(path), names, keyframe, within=path)
            elif not kept:
                base = self._known_base()
                self._seed(base, _plain(base), None)
            elif route.deltas:
                self._unsettle()
            else:
                return
            self._apply(opened)
        end = chain.version(version)
        self._settle(end.run_id, version, None if end.full is None else _stamp(store, version))

    def _seed(self, source: str, names: Iterable[str], manifest: Manifest | None, within: Path | None = None) -> None:
        """Copy files, verify them by the manifest where there is one, and remove all others.

        Links may not lead out of ``within``; those of the engine's own checkpoint may lead anywhere.
        """
        self._unsettle()
        names = sorted(names)
        for name in names:
            target = self.directory / name
            with suppress(FileNotFoundError):  # whoever has the old file mapped keeps it
                target.unlink()
            _copy(f"{source}/{name}", target, within)
        for path in self.directory.iterdir():
            if path.is_file() and path.name not in names:
                path.unlink()
        scratch = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        rows = () if manifest is None else manifest.params
        for name in sorted({row.file for row in rows if row.checksum}):
            file = TensorFile(self.directory / name)
            for row in (row for row in rows if row.file == name):
                if row.meta.name not in file.entries or file.checksum(row.meta.name, scratch) != row.checksum:
                    raise IntegrityError(
                        f"tensor {row.meta.name!r} in {source}/{name} is damaged",
                        expected=f"xxh3-128 {row.checksum}",
                        state=f"{self.directory} is copied anew by the next call",
                        hint="let the trainer publish again, and check the disk",
                    )
            file.close()

    def _apply(self, route: OpenRoute) -> None:
        """Write what changes on a route into the files, and make it durable."""
        places = self._places()
        for meta in route.params if route.deltas else ():
            if meta.name not in places or places[meta.name][0] != meta:
                raise ManifestError(
                    f"the versions have a tensor {meta}",
                    expected=str(places.get(meta.name, ("no such tensor",))[0]),
                    state=f"{self.directory} holds a checkpoint of another model",
                )
        maps: dict[Path, mmap.mmap] = {}
        tensors = {name: self._mapped(*place, maps) for name, place in places.items()} if route.deltas else {}
        for patch in route.patches(tensors, lambda name: True):
            name = patch.meta.name
            tensor = tensors[name]
            apply_patch(patch, tensor)
            route.verify(name, tensor)
        for path, mapped in maps.items():
            mapped.flush()
            _sync(path)

    def _places(self) -> dict[str, tuple[ParamMeta, tuple[Path, int]]]:
        """Return what each tensor of the directory is, with its file and its first byte there, by name."""
        index, where = self.directory / INDEX_NAME, None
        with suppress(FileNotFoundError):
            where = parse_index(index.read_bytes(), str(index))[1]
        files = {path.name for path in self.directory.glob("*.safetensors")} if where is None else {*where.values()}
        found: dict[str, tuple[ParamMeta, tuple[Path, int]]] = {}
        for file in sorted(files):
            path = self.directory / file
            opened = TensorFile(path)
            begin = opened.nbytes - sum(meta.nbytes for meta, _ in opened.entries.values())
            opened.close()
            for name, (meta, first) in opened.entries.items():
                if where is None or where.get(name) == file:
                    found[name] = meta, (path, begin + first)
        return found

    def _mapped(self, meta: ParamMeta, place: tuple[Path, int], maps: dict[Path, mmap.mmap]) -> Tensor:
        """Return a tensor that is the bytes of a file."""
        path, first = place
        if not meta.numel:
            return torch.empty(meta.shape, dtype=meta.dtype)
        if path not in maps:
            with open(path, "r+b") as file:
                maps[path] = mmap.mmap(file.fileno(), 0)
        count = meta.nbytes // meta.dtype.itemsize
        return torch.frombuffer(maps[path], dtype=meta.dtype, count=count, offset=first).view(meta.shape)

    # which version it is

    def _held(self) -> tuple[Held, str | None] | None:
        """Return what the state says: run and number, and the stamp of a full version; None where it cannot be used."""
        try:
            told = json.loads((self._sync / _STATE).read_bytes())
            number, run, stamp = int(told["version"]), told["run"], told.get("stamp")
            if number < 0 or not isinstance(run, str) or told["base"] != self._base:
                raise ValueError(f"it is of base {told['base']!r}")
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:  # slime's own has no run
            log.warning("%s says nothing of use: %r", self._sync / _STATE, error)
            return None
        return (run, number), stamp

    def _unsettle(self) -> None:
        """Remove the state, durably: from here on the files are none that a delta could be applied to."""
        (self._sync / _STATE).unlink(missing_ok=True)
        _sync(self._sync)

    def _settle(self, run: str, version: int, stamp: str | None) -> None:
        _sync(self.directory)
        state = {"version": f"{version:06d}", "run": run, "base": self._base, "stamp": stamp}
        draft = self._sync / f"{_STATE}.tmp"
        draft.write_text(json.dumps(state))
        _sync(draft)
        os.replace(draft, self._sync / _STATE)
        _sync(self._sync)

    # who may change it

    def _refuse(self, source: str) -> None:
        admit(source)
        admit(self._named)
        if "://" in self._named:
            raise ConfigError(
                f"the local checkpoint is {self._named!r:.200}",
                expected="an absolute path of a directory on this host",
                state="nothing was changed",
            )
        own = os.path.realpath(self.directory)
        others = [] if "://" in source.removeprefix("file://") else [os.path.realpath(source.removeprefix("file://"))]
        for other in (*others, *([] if self._base is None else [self._base])):
            if os.path.commonpath((own, other)) in (own, other):
                raise ConfigError(
                    f"the local checkpoint {self.directory} lies in {other}, or has it inside",
                    expected="a directory of its own, as files are replaced and removed there",
                    state="nothing was changed",
                )
        if self.directory.is_dir() and not self._sync.is_dir() and any(self.directory.iterdir()):
            raise ConfigError(
                f"{self.directory} holds files, and never was a local checkpoint",
                expected="an empty directory, or a new one: what a version does not have is removed",
                state="nothing was changed",
            )

    def _known_base(self, why: str = "") -> str:
        if self._base is None:
            raise ConfigError(
                f"{why}the checkpoint that the engine was started with is no directory here",
                state="nothing was changed",
                hint="start the server with a directory as its model, or let the trainer publish a full version",
            )
        return self._base

    @contextmanager
    def _locked(self, timeout_s: float) -> Iterator[None]:
        try:
            os.makedirs(self._sync, exist_ok=True)
            descriptor = os.open(self._sync / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreError(f"{self.directory} cannot be used: {error}", state="nothing was changed") from error
        try:
            Deadline(timeout_s).poll(partial(_taken, descriptor), f"others did not stop changing {self.directory}")
            yield
        finally:
            os.close(descriptor)


def _taken(descriptor: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _stamp(store: Store, version: int) -> str | None:
    """Return what tells another library's full version from one that replaced it: it names no run."""
    found = (store.stamp(f"{version_name(version)}/{name}") for name in (INDEX_NAME, _LONE))
    return next(filter(None, found), None) if version else None


def _plain(directory: str) -> list[str]:
    return [entry.name for entry in os.scandir(directory) if entry.is_file() and entry.name != MANIFEST]


def _is_taken(name: str) -> bool:
    return name.endswith(_TAKEN) and not name.startswith(".") and name != MANIFEST


def _copy(source: str, target: Path, within: Path | None) -> None:
    """Copy a file's bytes durably, sharing blocks where the filesystem can."""
    descriptor, size = open_regular(source, within=within)
    with open(descriptor, "rb") as old, open(target, "xb") as new:
        left = size
        with suppress(OSError):  # no such call between these two filesystems
            while left and (count := os.copy_file_range(old.fileno(), new.fileno(), left)):
                left -= count
        if left:
            for file in (old, new):
                file.seek(size - left)
            shutil.copyfileobj(old, new, CHUNK_BYTES)
        new.flush()
        os.fsync(new.fileno())
        if os.fstat(new.fileno()).st_size != size:
            raise IntegrityError(f"{source} changed while it was copied", expected=f"{size:,} bytes")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
