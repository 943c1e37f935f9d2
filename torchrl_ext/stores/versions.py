"""Version directories in a store, and the pointer to the newest.

    <root>/weight_v000007/...          files of one version
    <root>/weight_v000007/manifest.json    its last file: a directory without one is not a version
    <root>/latest                      number of the newest version; moved last, and never back

In an object store the pointer could be put late by a writer that has lost the root. There the newest complete version
counts, which is as good: its manifest was created last, and nobody removes it before there is a newer one.

Nothing is ever rewritten in place. A reader that has a version's files open may read on while it is removed; one that
comes too late sees `FileNotFoundError` and takes the newest instead.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left

import xxhash

from torchrl_ext.errors import IntegrityError, StoreError
from torchrl_ext.stores.base import Store
from torchrl_ext.stores.delta_manifest import DeltaManifest, read_manifest
from torchrl_ext.stores.manifest import LARGEST, MANIFEST, Manifest

__all__ = ["LATEST", "Versions", "version_name", "version_number"]

log = logging.getLogger("torchrl_ext")

LATEST = "latest"
_LONGEST = 64  # bytes
_PARSED = 2  # manifests that are kept for whoever looks again: of a keyframe and its delta
_NAME = re.compile(r"weight_v(\d{6}|[1-9]\d{6,17})", re.ASCII)


def version_name(version: int) -> str:
    """Return the directory of a version: 7 -> ``"weight_v000007"``."""
    return f"weight_v{version:06d}"


def version_number(name: str) -> int | None:
    """Return the version of a directory: ``"weight_v000007"`` -> 7; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


class Versions:
    """The versions in a store.

    Args:
        store: where they are; one writer at a time.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._seen: tuple[int, str | None] = (0, None)
        self._parsed: dict[bytes, Manifest | DeltaManifest] = {}

    def numbers(self) -> list[int]:
        """Return every version there is, oldest first."""
        found = map(_NAME.fullmatch, self.store.list())
        return sorted(int(match[1]) for match in found if match)

    def latest(self) -> int:
        """Return the newest version that is published; 0 before the first.

        Raises:
            IntegrityError: the pointer holds something else than a number.
        """
        pointed = self._pointed()
        for number in reversed(self.numbers()) if pointed and not self.store.locked else ():
            if MANIFEST in self.store.list(version_name(number)):
                return number
        return pointed

    def _pointed(self) -> int:
        try:
            text = self.store.get(LATEST, at_most=_LONGEST)
        except FileNotFoundError:
            return 0
        if not text.strip().isdigit() or len(text.strip()) > 18:  # as many digits as a name takes
            raise IntegrityError(
                f"the pointer {LATEST!r} in {self.store.url} holds {text[:40]!r}",
                expected="a version number",
                hint="write the number of the newest version into it",
            )
        return int(text)

    def newest(self) -> int:
        """Return the highest number that was ever used here, pointer moved or not; 0 before the first."""
        return max([self._pointed(), *self.numbers()])

    def advance(self, version: int) -> None:
        """Move the pointer forward.

        Raises:
            StoreError: it is at a newer version already.
        """
        pointed, now = self._pointed(), self.latest()
        if version < now:
            raise StoreError(
                f"the pointer in {self.store.url} would go back from version {now} to {version}",
                expected="versions that only grow",
            )
        if version > pointed:
            self.store.put(LATEST, b"%d\n" % version)

    def manifest(self, version: int, inside: str = "") -> Manifest | DeltaManifest:
        """Return what ``version`` holds. It is looked at more than once while it is followed, and parsed once.

        Args:
            version: its number.
            inside: a folder in its directory, with a slash before.

        Raises:
            FileNotFoundError: there is no such version (any more).
            IntegrityError: its manifest is damaged, or says that it is another version.
        """
        key = f"{version_name(version)}{inside}/{MANIFEST}"
        data = self.store.get(key, at_most=LARGEST)
        mark = xxhash.xxh3_128_digest(data)
        found = self._parsed.pop(mark, None) or read_manifest(data, f"{self.store.url}/{key}")
        if found.version != version:
            raise IntegrityError(f"{self.store.url}/{key} says that it is version {found.version}")
        self._parsed[mark] = found  # the newest last
        while len(self._parsed) > _PARSED:
            del self._parsed[next(iter(self._parsed))]
        return found

    def offered(self, version: int) -> None:
        """Note that a reader is about to read ``version``; `replaced` compares with what is there then."""
        self._seen = version, self._stamp(version)

    def replaced(self, version: int, run_id: str) -> bool:
        """Return whether ``version``, read as one of the run ``run_id``, is another run's now.

        A number does not say that: somebody may have emptied the root, and the next run got as far. What is there is
        read only when it was put anew. Versions without a manifest of ours name no run.

        Raises:
            FileNotFoundError: it is gone meanwhile.
            IntegrityError: its manifest is damaged.
        """
        seen = version, self._stamp(version)
        if seen[1] is None or seen == self._seen:
            return False
        found = self.manifest(version)
        if found.run_id == run_id:
            self._seen = seen
        return found.run_id != run_id

    def _stamp(self, version: int) -> str | None:
        return self.store.stamp(f"{version_name(version)}/{MANIFEST}")

    def prune(self, before: int) -> list[int]:
        """Remove versions older than ``before``; what cannot be removed is logged, since newer ones serve already.

        Returns:
            The versions that were older.
        """
        try:
            numbers = self.numbers()
        except StoreError as error:
            log.warning("old weights versions stay: %s", error)
            return []
        older = numbers[: bisect_left(numbers, before)]
        for number in older:
            try:
                self.store.delete(version_name(number))
            except StoreError as error:
                log.warning("old weights version %d stays: %s", number, error)
        return older
