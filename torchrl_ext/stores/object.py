"""`ObjectStore`: a bucket, through fsspec (https://filesystem-spec.readthedocs.io): ``s3://``, ``gs://``, ``memory://``.

A put of an object store is atomic and durable by itself, and a folder is no more than a common prefix. So a draft puts
its files under their final names, and the last one, which readers look for first, makes it a version. Object stores
have no locks: that one trainer writes into a root is up to whoever starts trainers.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from torchrl_ext.errors import ConfigError, StoreError, WeightSyncError
from torchrl_ext.stores.base import Draft, Root, checked_key

__all__ = ["ObjectStore"]

_Result = TypeVar("_Result")


class ObjectStore(Root):
    """Objects under a URL.

    Args:
        url: ``protocol://bucket/prefix``.
        storage_options: of the fsspec filesystem. What is left out comes from the environment, as its documentation
            says; workers are told the URL only, never these.

    Raises:
        ConfigError: fsspec, or the package for this protocol, is not installed.
    """

    def __init__(self, url: str, **storage_options: Any) -> None:
        try:
            from fsspec.core import url_to_fs

            self._fs, path = url_to_fs(url, use_listings_cache=False, **storage_options)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{url} cannot be opened: {error}", hint="pip install fsspec, and the package for the protocol (s3fs)"
            ) from error
        self._url, self._path = url.rstrip("/"), path.rstrip("/")
        self._owned = False

    @property
    def url(self) -> str:
        return self._url

    # writer

    @property
    def owned(self) -> bool:
        return self._owned

    def own(self) -> None:
        self._owned = True

    def disown(self) -> None:
        self._owned = False

    def put(self, key: str, data: bytes) -> None:
        self._call("write", key, lambda path: self._fs.pipe_file(path, bytes(data)))

    @contextmanager
    def draft(self, folder: str, needed_bytes: int = 0) -> Iterator[Draft]:
        if self.list(folder):
            raise StoreError(
                f"{self._url}/{folder} exists already", state="nothing was written", hint="pick the next version number"
            )
        staging = Path(tempfile.mkdtemp(prefix="torchrl-ext-"))
        try:
            if needed_bytes and shutil.disk_usage(staging).free < needed_bytes:
                raise StoreError(
                    f"a version is staged in {staging}, where {shutil.disk_usage(staging).free:,} bytes are free",
                    expected=f"{needed_bytes:,} bytes",
                    state="nothing was written",
                    hint="free some space, or point TMPDIR elsewhere",
                )
            draft = _ObjectDraft(staging, folder, self)
            yield draft
            draft.upload()
        except BaseException as error:
            with suppress(StoreError):
                self.delete(folder)
            if isinstance(error, OSError) and not isinstance(error, WeightSyncError):
                raise StoreError(
                    f"cannot stage {folder} in {staging}: {error}", state=f"{self._url} holds what it held"
                ) from error
            raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def upload(self, path: Path, key: str) -> None:
        """Put a local file.

        Raises:
            StoreError: as `put`.
        """
        self._call("write", key, lambda target: self._fs.put_file(str(path), target))

    def delete(self, key: str) -> None:
        """Objects go one by one, the manifest first: without it the rest is no version any more."""

        def remove(path: str) -> None:
            found = [] if self._fs.isfile(path) else self._fs.find(path)
            last = [name for name in found if not name.endswith("manifest.json")]
            for name in [*(name for name in found if name not in last), *last] or [path]:
                with suppress(FileNotFoundError):
                    self._fs.rm_file(name)
            if found and self._fs.isdir(path):  # filesystems with real directories (memory://)
                with suppress(FileNotFoundError):
                    self._fs.rm(path, recursive=True)

        self._call("remove", key, remove)

    # reader

    def get(self, key: str) -> bytes:
        return self._call("read", key, self._fs.cat_file)

    def list(self, folder: str = "") -> list[str]:
        try:
            found = self._call("list", folder, lambda path: self._fs.ls(path, detail=False))
        except FileNotFoundError:
            return []
        base = f"{self._path}/{folder}".rstrip("/")
        names = {name.rstrip("/").rsplit("/", 1)[-1] for name in found if name.rstrip("/") != base}
        return sorted(name for name in names if name and not name.startswith("."))

    def sizes(self, folder: str) -> dict[str, int]:
        try:
            found = self._call("list", folder, lambda path: self._fs.ls(path, detail=True))
        except FileNotFoundError:
            return {}
        sizes = {row["name"].rsplit("/", 1)[-1]: row["size"] for row in found if row["type"] == "file"}
        return {name: size for name, size in sizes.items() if not name.startswith(".")}

    @contextmanager
    def local(self, folder: str, names: Iterable[str]) -> Iterator[Path]:
        staging = Path(tempfile.mkdtemp(prefix="torchrl-ext-"))
        try:
            for name in names:
                key = f"{folder}/{name}"
                target = str(staging / checked_key(name))
                self._call("fetch", key, lambda path, target=target: self._fs.get_file(path, target))
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def available(self) -> bool:
        try:
            self.list()
        except StoreError:
            return False
        return True

    def _call(self, doing: str, key: str, call: Callable[[str], _Result]) -> _Result:
        """Errors of clients have no common root: whatever comes is a `StoreError`, but that nothing is there."""
        path = f"{self._path}/{checked_key(key)}" if key else self._path
        try:
            return call(path)
        except (FileNotFoundError, WeightSyncError):
            raise
        except Exception as error:
            raise StoreError(
                f"cannot {doing} {self._url}/{key}: {error!r}", hint="check address, credentials and network"
            ) from error


class _ObjectDraft(Draft):
    def __init__(self, path: Path, folder: str, store: ObjectStore) -> None:
        self.path, self._folder, self._store = path, folder, store

    def write(self, name: str, data: bytes) -> None:
        self.upload()
        self._store.put(f"{self._folder}/{name}", data)

    def upload(self) -> None:
        """Put what was written into the local directory, and free its space."""
        for file in sorted(self.path.iterdir()):
            self._store.upload(file, f"{self._folder}/{file.name}")
            file.unlink()
