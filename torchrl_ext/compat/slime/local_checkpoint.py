"""A checkpoint on an engine's host that follows published versions, as the engines of slime and vime keep one.

slime's layout (THUDM/slime at 474861aaf, its patch of SGLang; vime has the same): a plain checkpoint directory, beside
whose files lies ``.weight_sync/`` with

    lock         held (flock) by whoever changes the directory
    state.json   which version the files are: {"version": "000005"}

``state.json`` goes before the first byte changes and comes back when the last one is durable, so it never stands beside
files that are not what it says: without it, slime's readers and this one copy a whole version first. Ours has more
fields, which slime's reader passes over: the run that published the version, and the base checkpoint.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
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
from torchrl_ext.files import LocalFile, OpenFile, sync
from torchrl_ext.stores import Chain, Manifest, Store, open_store, version_name
from torchrl_ext.stores.manifest import MANIFEST
from torchrl_ext.stores.opening import admit
from torchrl_ext.stores.versions import Held, Version
from torchrl_ext.types import ParamMeta
from torchrl_ext.versions.checkpoint_reader import PublishedVersion
from torchrl_ext.versions.open_route import OpenRoute
from torchrl_ext.weights.tensorfile import TensorFile

__all__ = ["LocalCheckpoint"]

log = logging.getLogger("torchrl_ext")

_SYNC: Final = ".weight_sync"
_STATE: Final = "state.json"
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

    def pull(self, source: str, version: int, *, timeout_s: float = _LOCK_S) -> None:
        """Bring the files to a version: in place by what changed, else by a copy of a full one and the deltas after it.

        What the directory holds counts only where ``source`` does not say that another run published it.

        Args:
            source: the directory or URL under which versions lie, ``weight_v000005`` and so on.
            version: its number; 0 is the base.
            timeout_s: how long to wait for others who change the directory, in seconds.

        Raises:
            ConfigError: directories that this engine may not open, or that cannot go together; or there is no base.
            DeadlineError: others did not get done in time.
            StoreError: there is no such version; the directory cannot be written.
            IntegrityError: damaged files, or no route from what is there to the version.
            ManifestError: a delta belongs to another model.
        """
        self._refuse(source)
        with self._locked(timeout_s):
            store, held = open_store(source), self._held()
            try:
                try:
                    self._bring(store, version, held)
                except (IntegrityError, ManifestError) as error:
                    if held is None:
                        raise
                    log.warning("%s is copied again: %s", self.directory, error)
                    self._bring(store, version, None)
            except FileNotFoundError as error:
                raise StoreError(
                    f"{source} holds no complete version {version}, or not all that leads to it: {error}",
                    expected="every file of a version before you request it",
                    state=f"{self.directory} is unchanged, or the next call copies it again",
                ) from error
            except OSError as error:
                raise StoreError(
                    f"{self.directory} cannot be written: {error}",
                    state="the next call copies it again",
                    hint="name a directory on a local disk with room for the model",
                ) from error

    def _bring(self, store: Store, version: int, held: Held | None) -> None:
        """Bring the files from version ``held`` to ``version``; from any state where it is None."""
        if version == 0:
            if held is None or held[1]:
                self._seed_base()
                self._settle("", 0)
            return
        chain = Chain(store, view=ForeignVersions(store, self._base))
        if held is not None and held[1] and not store.list(version_name(held[1])):  # nothing else describes it
            params = tuple(ParamMeta.of(name, tensor) for name, tensor in self._mapped()[1].items())
            chain.known[held[1]] = Version(run_id=held[0], params=params)
        try:
            route = chain.route(version, held, based=self._base is not None)
        except (ConfigError, IntegrityError):
            if self._base is None:
                self._known_base(f"version {version} of {store.url} cannot be reached without its base, and ")
            raise
        opens = partial(PublishedVersion, store)
        with closing(OpenRoute(chain, route, version, opens, held, None)) as opened:
            if route.keyframe is not None:
                self._seed_keyframe(store, route.keyframe)
            elif held is None or route.start is None or route.start[1] != held[1]:
                self._seed_base()
            elif route.deltas:
                self._unsettle()
            else:
                return
            self._apply(opened)
        self._settle(*opened.reached)

    def _seed_keyframe(self, store: Store, manifest: Manifest) -> None:
        """Copy the files of a published version, and verify the copies by its manifest."""
        folder = version_name(manifest.version)
        self._seed({name: partial(store.open, f"{folder}/{name}") for name in store.sizes(folder) if _is_taken(name)})
        with closing(PublishedVersion(store, manifest.version, manifest, at=self.directory)) as copied:
            copied.verify({row.meta.name for row in manifest.params if row.checksum})

    def _seed_base(self) -> None:
        """Copy the files of the engine's own checkpoint, whose links may lead anywhere."""
        with os.scandir(self._known_base()) as entries:
            files = {entry.name: entry.path for entry in entries if entry.is_file() and entry.name != MANIFEST}
        self._seed({name: partial(LocalFile, path) for name, path in files.items()})

    def _seed(self, files: Mapping[str, Callable[[], OpenFile]]) -> None:
        """Copy files, which are opened one after the other, and remove all others."""
        self._unsettle()
        for name, opens in files.items():
            target = self.directory / name
            with suppress(FileNotFoundError):  # whoever has the old file mapped keeps it
                target.unlink()
            with closing(opens()) as source:
                _copy(source, target)
        for path in self.directory.iterdir():
            if path.is_file() and path.name not in files:
                path.unlink()

    def _apply(self, route: OpenRoute) -> None:
        """Write what changes on a route into the files, and make it durable."""
        if not route.deltas:
            return
        paths, tensors = self._mapped()
        for meta in route.params:
            found = ParamMeta.of(meta.name, tensors[meta.name]) if meta.name in tensors else "no such tensor"
            if found != meta:
                raise ManifestError(
                    f"the versions have a tensor {meta}",
                    expected=str(found),
                    state=f"{self.directory} holds a checkpoint of another model",
                )
        changed = dict[str, None]()
        for patch in route.patches(tensors, lambda name: True):
            for own in patch.split():
                apply_patch(own, tensors[own.meta.name])
                changed[own.meta.name] = None
        for name in changed:
            route.verify(name, tensors[name])
        for path in paths:
            sync(path)

    def _mapped(self) -> tuple[list[Path], dict[str, Tensor]]:
        """Return the files of the weights, and each tensor in them by name, whose memory is the file."""
        index, where = self.directory / INDEX_NAME, None
        with suppress(FileNotFoundError):
            where = parse_index(index.read_bytes(), str(index))[1]
        files = {path.name for path in self.directory.glob("*.safetensors")} if where is None else {*where.values()}
        paths, tensors = [self.directory / file for file in sorted(files)], dict[str, Tensor]()
        for path in paths:
            with closing(TensorFile(path)) as opened, open(path, "r+b") as file:
                begin = opened.nbytes - sum(meta.nbytes for meta in opened.params())
                mapped = mmap.mmap(file.fileno(), 0)
            for name, (meta, first) in opened.entries.items():
                if where is None or where.get(name) == path.name:
                    flat = torch.empty(0, dtype=meta.dtype)
                    if meta.numel:
                        flat = torch.frombuffer(mapped, dtype=meta.dtype, count=meta.numel, offset=begin + first)
                    tensors[name] = flat.view(meta.shape)
        return paths, tensors

    # which version it is

    def _held(self) -> Held | None:
        """Return the run and the number that the state names; None where it cannot be used."""
        try:
            told = json.loads((self._sync / _STATE).read_bytes())
            number, run = int(told["version"]), told["run"]
            if number < 0 or not isinstance(run, str) or told["base"] != self._base:
                raise ValueError(f"it is of base {told['base']!r}")
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:  # slime's own has no run
            log.warning("%s cannot be used: %r", self._sync / _STATE, error)
            return None
        return run, number

    def _unsettle(self) -> None:
        """Remove the state, durably: from here on the files are none that a delta could be applied to."""
        (self._sync / _STATE).unlink(missing_ok=True)
        sync(self._sync)

    def _settle(self, run: str, version: int) -> None:
        sync(self.directory)
        state = {"version": f"{version:06d}", "run": run, "base": self._base}
        draft = self._sync / f"{_STATE}.tmp"
        draft.write_text(json.dumps(state))
        sync(draft)
        os.replace(draft, self._sync / _STATE)
        sync(self._sync)

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
                    expected="a separate directory, because files in it are replaced and removed",
                    state="nothing was changed",
                )
        if (
            self.directory.is_dir() and any(self.directory.iterdir()) and not self._sync.is_dir()
        ):  # others make it first
            raise ConfigError(
                f"{self.directory} holds files but has never been a local checkpoint",
                expected="an empty or new directory, because files that a version does not have are removed",
                state="nothing was changed",
            )

    def _known_base(self, why: str = "") -> str:
        if self._base is None:
            raise ConfigError(
                f"{why}the checkpoint that the engine was started with is not a directory here",
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
            Deadline(timeout_s).poll(partial(_taken, descriptor), f"other processes kept changing {self.directory}")
            yield
        finally:
            os.close(descriptor)


def _taken(descriptor: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _is_taken(name: str) -> bool:
    return name.endswith(_TAKEN) and not name.startswith(".") and name != MANIFEST


def _copy(source: OpenFile, target: Path) -> None:
    """Copy a file's bytes durably."""
    buffer, size = memoryview(bytearray(min(source.nbytes, source.chunk_bytes))), 0
    with open(target, "xb") as new:
        while count := source.read_into(buffer, size):
            new.write(buffer[:count])
            size += count
        new.flush()
        os.fsync(new.fileno())
    if size != source.nbytes:
        raise IntegrityError(f"{source.path} changed while it was copied", expected=f"{source.nbytes:,} bytes")
