"""`ObjectStore`: a bucket, through fsspec (https://filesystem-spec.readthedocs.io): ``s3://``, ``gs://``, ``memory://``.

A put of an object store is atomic and durable by itself, and a folder is no more than a common prefix. So a draft puts
its files under their final names, and the last one, which readers look for first, makes it a version.

Object stores have no locks. Most can create a key only where there is none, and that keeps two writers apart: a root
has an owner (`torchrl_ext.stores.owners`), a draft first claims its folder, and what it writes into it is created. A
draft that fails removes what it wrote itself. A store that cannot create in this sense is used with a warning.
"""

from __future__ import annotations

import inspect
import logging
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from operator import itemgetter
from typing import Any, ClassVar, TypeVar, final

from torchrl_ext.errors import ConfigError, IntegrityError, StoreError, WeightSyncError
from torchrl_ext.files import OpenFile
from torchrl_ext.stores.base import Draft, Store, checked_key
from torchrl_ext.stores.local import TEMPORARY
from torchrl_ext.stores.owners import Owners

__all__ = ["PART_BYTES", "ObjectStore"]

log = logging.getLogger("torchrl_ext")

_CLAIM, _TOKEN = ".claim", 32
_PIECE_BYTES = 8 << 20  # of one request
PART_BYTES = 32 << 20
"""Bytes of one part of an object that is uploaded in parts, which are held in memory."""
_Result = TypeVar("_Result")


class ObjectStore(Store):
    """A store that keeps its values as objects under a URL.

    Args:
        url: ``protocol://bucket/prefix``.
        storage_options: settings of the fsspec filesystem. What is left out comes from the environment, as its
            documentation says; workers are told the URL only, never these.

    Raises:
        ConfigError: fsspec, or the package for this protocol, is not installed.
    """

    locked: ClassVar[bool] = False
    reads_removed: ClassVar[bool] = False
    gap_bytes: ClassVar[int] = 256 << 10

    def __init__(self, url: str, **storage_options: Any) -> None:
        try:
            from fsspec.core import url_to_fs

            self._fs, path = url_to_fs(url, use_listings_cache=False, **storage_options)
        except (ImportError, ValueError) as error:
            s3 = url.startswith(("s3://", "s3a://"))
            needs = "'torchrl_ext[s3]'" if s3 else "fsspec, and the package for the protocol"
            raise ConfigError(f"{url} cannot be opened: {error}", hint=f"pip install {needs}") from error
        self.url, self._path = url.rstrip("/"), path.rstrip("/")
        self._owners = Owners(self)
        self._creates = _creates(self._fs)

    # writer

    def own(self) -> bool:
        if self.owned:
            return False
        self._owners.enter()
        self.owned = True
        if self._creates:  # some accept the condition and ignore it
            self._creates = not self._overwrites()
        if not self._creates:
            log.warning(
                "%s cannot create a key only if it is absent, so two trainers that start at the same moment, or "
                "publish the same version at the same moment, would not notice each other",
                self.url,
            )
        return True

    def disown(self) -> None:
        self.owned = False
        with suppress(StoreError):  # then it counts as dead a little later
            self._owners.leave()

    def put(self, key: str, data: bytes) -> None:
        self._call("write", key, lambda path: self._fs.pipe_file(path, bytes(data)))

    def create(self, key: str, data: bytes) -> bool:
        """Put a value only where there is none, and return whether it is there now.

        Returns:
            Whether ``data`` is what lies there now. The content is compared, since a put that a client repeats after a
            lost answer fails as if another writer had come first.

        Raises:
            StoreError: as `put`; whether the value is there is not known then.
        """
        try:
            if self._creates:
                self._call("create", key, lambda path: self._fs.pipe_file(path, bytes(data), mode="create"))
                return True
            if not self._call("look for", key, self._fs.exists):
                self.put(key, data)
            return self.get(key) == data
        except FileNotFoundError:  # removed again meanwhile
            return False
        except StoreError:
            with suppress(FileNotFoundError):
                return self.get(key) == data
            raise

    @contextmanager
    def draft(self, folder: str, needed_bytes: int = 0) -> Iterator[Draft]:
        draft = _ObjectDraft(folder, self)
        draft.claim()
        try:
            if self.owned:
                self._owners.require()  # after the claim: who comes as the owner from now on sees the folder
            yield draft
        except BaseException:
            draft.withdraw()
            raise
        draft.settle()

    def add(self, place: str, name: str, data: bytes) -> None:
        folder, _, token = place.rpartition(":")
        key = f"{folder}/{name}"

        def require() -> None:
            with suppress(FileNotFoundError):
                if self.get(f"{folder}/{_CLAIM}", at_most=_TOKEN) == token.encode():
                    return
            raise StoreError(
                f"{self.url}/{folder} is no longer being written, or another trainer writes it",
                state="nothing was written",
                hint="send again, on every trainer rank",
            )

        require()
        self.put(key, data)
        try:
            require()
        except StoreError:  # whoever withdrew the draft may not have seen this file
            self.delete(key)
            raise

    def delete(self, key: str) -> None:
        """Remove objects one by one, the manifest first: without it the rest is no version any more."""

        def remove(path: str) -> None:
            found = [] if self._fs.isfile(path) else self._fs.find(path)
            last = [name for name in found if not name.endswith("manifest.json")]
            for name in [*(name for name in found if name not in last), *last] or [path]:
                with suppress(FileNotFoundError):
                    self._fs.rm_file(name)
            if found and self._fs.isdir(path):  # filesystems with real directories (memory://)
                with suppress(OSError):  # somebody else put something into it
                    self._fs.rmdir(path)

        self._call("remove", key, remove)

    # reader

    def get(self, key: str, at_most: int | None = None) -> bytes:
        def read(path: str) -> bytes:
            size = None if at_most is None else self._fs.info(path)["size"]
            if at_most is not None and size is not None and size > at_most:
                raise IntegrityError(f"{path} has {size:,} bytes", expected=f"at most {at_most:,}", state="not read")
            return self._fs.cat_file(path)

        return self._call("read", key, read)

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        def read(path: str) -> list[bytes]:
            firsts, ends = zip(*((first, first + nbytes) for first, nbytes in spans), strict=True)
            found = self._fs.cat_ranges([path] * len(spans), list(firsts), list(ends), on_error="raise")
            return [bytes(data) for data in found]

        return self._call("read", key, read) if spans else []

    def open(self, key: str) -> OpenFile:
        return _Object(self, key, self._call("look for", key, self._fs.info)["size"])

    def stamp(self, key: str) -> str | None:
        try:
            return str(self._call("look for", key, self._fs.ukey))
        except FileNotFoundError:
            return None

    def list(self, folder: str = "") -> list[str]:
        return sorted(self._rows(folder))

    def sizes(self, folder: str) -> dict[str, int]:
        return {name: row["size"] for name, row in self._rows(folder).items() if row["type"] == "file"}

    def _rows(self, folder: str) -> dict[str, dict[str, Any]]:
        """Return what the filesystem says of everything directly under ``folder``, by name."""
        try:
            found = self._call("list", folder, lambda path: self._fs.ls(path, detail=True))
        except FileNotFoundError:
            return {}
        base = f"{self._path}/{folder}".rstrip("/")
        rows = {row["name"].rstrip("/").rsplit("/", 1)[-1]: row for row in found if row["name"].rstrip("/") != base}
        return {name: row for name, row in rows.items() if name and not name.startswith(".")}

    def available(self) -> bool:
        try:
            self.list()
        except StoreError:
            return False
        return True

    @contextmanager
    def append(self, key: str) -> Iterator[Callable[[bytes | memoryview], object]]:
        """Put a value piece by piece: `Draft.append` for a key."""
        file = self._call("write", key, lambda path: self._fs.open(path, "wb", block_size=PART_BYTES))
        try:
            yield lambda data: self._call("write", key, lambda _: file.write(data))
        except BaseException:
            with suppress(Exception):  # the value is removed with the draft
                file.discard()
                file.closed = True  # else fsspec completes the upload when the file is freed
            raise
        self._call("write", key, lambda _: file.close())

    def _overwrites(self) -> bool:
        """Return whether creating a key again replaces its value."""
        probe = TEMPORARY.join((".probe", uuid.uuid4().hex))
        self.create(probe, b"1")
        try:
            return self.create(probe, b"2")
        finally:
            self.delete(probe)

    def _call(self, doing: str, key: str, call: Callable[[str], _Result]) -> _Result:
        """Call ``call`` with a key's path, and turn client errors, which have no common base, into `StoreError`."""
        path = f"{self._path}/{checked_key(key)}" if key else self._path
        try:
            return call(path)
        except (FileNotFoundError, WeightSyncError):
            raise
        except Exception as error:
            raise StoreError(
                f"cannot {doing} {self.url}/{key}: {error!r}", hint="check address, credentials and network"
            ) from error


@final
class _Object(OpenFile):
    """An object that is read in ranges, of which several are requested at once."""

    chunk_bytes: ClassVar[int] = 64 << 20

    def __init__(self, store: ObjectStore, key: str, nbytes: int) -> None:
        self.path, self.nbytes, self._store, self._key = f"{store.url}/{key}", nbytes, store, key
        self._fetched: list[tuple[int, bytes]] = []

    def ahead(self, spans: Sequence[tuple[int, int]]) -> None:
        self._fetched, joined = [], list[list[int]]()
        for first, nbytes in sorted(spans):
            if not joined or first > joined[-1][1]:
                joined.append([first, first])
            joined[-1][1] = max(joined[-1][1], first + nbytes)
        self._fetched = [one for first, end in joined for one in self._pieces(first, end)]

    def read_into(self, view: memoryview, offset: int) -> int:
        at = bisect_right(self._fetched, offset, key=itemgetter(0)) - 1
        if at >= 0 and offset < self._fetched[at][0] + len(self._fetched[at][1]):
            first, data = self._fetched[at]
            part = memoryview(data)[offset - first :][: len(view)]
            view[: len(part)] = part
            return len(part)
        count = 0
        for first, data in self._pieces(offset, offset + min(len(view), self.chunk_bytes)):
            view[first - offset :][: len(data)] = data
            count += len(data)
        return count

    def _pieces(self, first: int, end: int) -> list[tuple[int, bytes]]:
        starts = range(first, min(end, self.nbytes), _PIECE_BYTES)
        spans = [(start, min(_PIECE_BYTES, end - start)) for start in starts]
        return list(zip(starts, self._store.ranges(self._key, spans), strict=True))

    def close(self) -> None:
        self._fetched = []


def _creates(fs: Any) -> bool:
    """Return whether a filesystem can create exclusively by itself; fsspec's substitute looks first, and then puts."""
    for cls in type(fs).__mro__:
        for name in ("_pipe_file", "pipe_file"):
            if name in vars(cls):
                return not cls.__module__.startswith(("fsspec.spec", "fsspec.asyn")) and (
                    "mode" in inspect.signature(vars(cls)[name]).parameters
                )
    return False


class _ObjectDraft(Draft):
    """A draft under a folder that it claims: nobody else writes there, so it may remove what it wrote."""

    appends: ClassVar[bool] = True

    def __init__(self, folder: str, store: ObjectStore) -> None:
        self._folder, self._store = folder, store
        self._claim, self._token = f"{folder}/{_CLAIM}", uuid.uuid4().hex
        self._written: list[str] = []
        self._unknown = self._shared = False

    @property
    def place(self) -> str:
        self._shared = True
        return f"{self._folder}:{self._token}"

    def claim(self) -> None:
        """Claim the folder, so that no other draft writes into it.

        Raises:
            StoreError: it is taken, or there is something in it.
        """
        free = self._store.create(self._claim, self._token.encode())
        if free and self._store.list(self._folder):
            self._store.delete(self._claim)
            free = False
        if not free:
            raise StoreError(
                f"{self._store.url}/{self._folder} exists already",
                state="nothing was written",
                hint="pick the next version number",
            )

    def write(self, name: str, data: bytes) -> None:
        key = f"{self._folder}/{name}"
        try:
            created = self._store.create(key, data)
        except StoreError:
            self._unknown = name == "manifest.json"
            self._written.append(key)
            raise
        if not created:
            raise StoreError(
                f"another writer put {self._store.url}/{key}",
                expected="one trainer per root",
                state="it was left as it is",
                hint="give each trainer its own root",
            )
        self._written.append(key)

    def append(self, name: str) -> AbstractContextManager[Callable[[bytes | memoryview], object]]:
        key = f"{self._folder}/{name}"
        self._written.append(key)
        return self._store.append(key)

    def settle(self) -> None:
        """Remove the claim, as the complete folder shows by itself that it is taken."""
        with suppress(StoreError):
            self._store.delete(self._claim)

    def withdraw(self) -> None:
        """Remove what was written, the last file first; nothing where readers may see a version already."""
        if self._unknown:
            return
        if self._shared:  # who adds a file looks for the claim afterwards, and takes the file back
            with suppress(StoreError):
                self._store.put(self._claim, b"")
        for key in reversed(self._written):
            with suppress(StoreError):
                self._store.delete(key)
        with suppress(StoreError):
            for name in self._store.list(self._folder) if self._shared else ():
                self._store.delete(f"{self._folder}/{name}")
        with suppress(StoreError):
            self._store.delete(self._claim)
