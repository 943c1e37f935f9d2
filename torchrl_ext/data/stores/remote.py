"""`RemoteStore`: versions under a URL, through fsspec (https://filesystem-spec.readthedocs.io): ``s3://``, ``memory://``.

A remote store has neither locks nor a rename: it puts a value as a whole. What belongs to a version is only put where
there is nothing of that name (``If-None-Match: *`` on S3), so that one of two writers is refused; its manifest is last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar, TypeVar, final

from torchrl_ext.base.errors import ConfigError, StoreError, WeightSyncError
from torchrl_ext.base.files import OpenFile
from torchrl_ext.data.stores.manifest import MANIFEST
from torchrl_ext.data.stores.store import Draft, Store, checked_key, taken

__all__ = ["RemoteStore"]

_AHEAD_BYTES = 128 << 10  # at first: most headers
_Result = TypeVar("_Result")


@final
class _RemoteFile(OpenFile):
    """A value of which more and more is read ahead, as small tensors follow one another."""

    chunk_bytes: ClassVar[int] = 32 << 20

    def __init__(self, store: RemoteStore, key: str, nbytes: int) -> None:
        self.path, self.nbytes, self._store, self._key = f"{store.url}/{key}", nbytes, store, key
        self._first, self._data, self._ahead = 0, b"", _AHEAD_BYTES

    def read_into(self, view: memoryview, offset: int) -> int:
        if offset >= self.nbytes:
            return 0
        if not self._first <= offset < self._first + len(self._data):
            span = offset, max(len(view), self._ahead)
            self._first, self._data = offset, self._store.ranges(self._key, [span])[0]
            self._ahead = min(2 * self._ahead, self.chunk_bytes)
        data = memoryview(self._data)[offset - self._first :][: len(view)]
        view[: len(data)] = data
        if offset + len(data) == self._first + len(self._data):
            self._data = b""  # many files may be open, and are read one after the other
        return len(data)


class _RemoteDraft(Draft):
    """Files that are put as they are written, after those that were written into ``path``, a local directory."""

    def __init__(self, store: RemoteStore, folder: str, path: str) -> None:
        self._store, self._folder, self.path = store, folder, Path(path)
        self.created: list[str] = []  # keys that are removed where the block fails

    def write(self, name: str, data: bytes) -> None:
        for path in sorted(self.path.iterdir()):
            self._create(path.name, path.read_bytes())
            path.unlink()
        if name == MANIFEST:  # readers may see the version from here on
            self.created.clear()
        self._create(name, data)

    def _create(self, name: str, data: bytes) -> None:
        self._store.create(key := f"{self._folder}/{name}", data)
        if name != MANIFEST:
            self.created.append(key)


class RemoteStore(Store):
    """A store under a URL; fsspec and its clients find their settings in the environment.

    Args:
        url: ``protocol://bucket/prefix``.

    Raises:
        ConfigError: fsspec, or the package for this protocol, is not installed.
    """

    locked: ClassVar[bool] = False

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs

            self._fs, path = url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            hint = "install fsspec and the package of this protocol"
            if url.startswith("s3:"):
                hint = "pip install 'torchrl_ext[s3]'"
            raise ConfigError(f"{url} cannot be opened: {error}", hint=hint) from error
        self.url, self._path = url.rstrip("/"), path.rstrip("/")

    def put(self, key: str, data: bytes) -> None:
        self._call("write", key, lambda path: self._fs.pipe_file(path, data))

    def create(self, key: str, data: bytes) -> None:
        """Put a value where there is none.

        Raises:
            StoreError: there is another one; or the store cannot be reached, and the value may be there or not.
        """
        try:
            self._call("create", key, lambda path: self._fs.pipe_file(path, data, mode="create"))
        except StoreError:
            with suppress(FileNotFoundError):
                if self.get(key) == data:  # a client repeated a put that had succeeded
                    return
            raise

    @contextmanager
    def draft(self, folder: str) -> Iterator[Draft]:
        if self.list(folder):
            raise taken(f"{self.url}/{folder}")
        with TemporaryDirectory(prefix="torchrl-ext-") as path:
            draft = _RemoteDraft(self, folder, path)
            try:
                yield draft
            except BaseException:
                for key in draft.created:
                    with suppress(StoreError):
                        self.delete(key)
                raise

    def delete(self, key: str) -> None:
        """Remove values one by one, the manifest first: without it the rest is no version any more."""

        def remove(path: str) -> None:
            for name in sorted(self._fs.find(path), key=lambda name: name != f"{path}/{MANIFEST}"):
                with suppress(FileNotFoundError):
                    self._fs.rm_file(name)

        self._call("remove", key, remove)

    def open(self, key: str) -> OpenFile:
        return _RemoteFile(self, key, self._call("look for", key, self._fs.info)["size"])

    def get(self, key: str, at_most: int | None = None) -> bytes:
        if at_most is not None:
            self.open(key).at_most(at_most)
        return self._call("read", key, self._fs.cat_file)  # as it is at one time: it may be replaced

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        firsts, ends = [first for first, _ in spans], [first + nbytes for first, nbytes in spans]
        return self._call(
            "read", key, lambda path: self._fs.cat_ranges([path] * len(spans), firsts, ends, on_error="raise")
        )

    def list(self, folder: str = "") -> list[str]:
        try:
            found = self._call("list", folder, lambda path: [path, *self._fs.ls(path, detail=False)])
        except FileNotFoundError:
            return []
        names = (path.removeprefix(found[0]).strip("/") for path in found)
        return sorted(name for name in names if name and not name.startswith("."))

    def _call(self, doing: str, key: str, call: Callable[[str], _Result]) -> _Result:
        """Call ``call`` with a key's path, and turn errors of clients, which have no common base, into `StoreError`."""
        try:
            return call(f"{self._path}/{checked_key(key)}" if key else self._path)
        except (FileNotFoundError, WeightSyncError):
            raise
        except FileExistsError as error:
            raise StoreError(
                f"another trainer put {self.url}/{key}",
                expected="one trainer per root",
                state="it was left as it is",
                hint="give each trainer its own root",
            ) from error
        except Exception as error:
            raise StoreError(
                f"cannot {doing} {self.url}/{key}: {error!r}", hint="check address, credentials and network"
            ) from error
