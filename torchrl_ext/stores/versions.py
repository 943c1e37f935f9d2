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

from torchrl_ext.errors import IntegrityError, StoreError
from torchrl_ext.stores.base import Store
from torchrl_ext.stores.delta_manifest import read_manifest
from torchrl_ext.stores.manifest import LARGEST, MANIFEST, Manifest

__all__ = ["LATEST", "Versions", "version_name", "version_number"]

log = logging.getLogger("torchrl_ext")

LATEST = "latest"
_LONGEST = 64  # bytes
_NAME = re.compile(r"weight_v(\d{6,18})")


def version_name(version: int) -> str:
    """7 -> ``"weight_v000007"``."""
    return f"weight_v{version:06d}"


def version_number(name: str) -> int | None:
    """``"weight_v000007"`` -> 7; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and version_name(int(match[1])) == name else None


class Versions:
    """The versions in a store.

    Args:
        store: where they are; one writer at a time.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._seen: tuple[int, str | None] = (0, None)

    def numbers(self) -> list[int]:
        """Every version there is, oldest first."""
        found = (version_number(name) for name in self.store.list())
        return sorted(number for number in found if number is not None)

    def latest(self) -> int:
        """The newest version that is published; 0 before the first.

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
            text = self.store.get_at_most(LATEST, _LONGEST)
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
        """The highest number that was ever used here, pointer moved or not; 0 before the first."""
        return max([self.latest(), *self.numbers()])

    def advance(self, version: int) -> None:
        """Move the pointer forward.

        Raises:
            StoreError: it is at a newer version already.
        """
        now = self.latest()
        if version < now:
            raise StoreError(
                f"the pointer in {self.store.url} would go back from version {now} to {version}",
                expected="versions that only grow",
            )
        if version > self._pointed():
            self.store.put(LATEST, b"%d\n" % version)

    def manifest(self, version: int) -> Manifest:
        """What ``version`` holds.

        Raises:
            FileNotFoundError: there is no such version (any more).
            IntegrityError: its manifest is damaged, or says that it is another version.
        """
        key = f"{version_name(version)}/{MANIFEST}"
        where = f"{self.store.url}/{key}"
        manifest = Manifest.from_bytes(self.store.get_at_most(key, LARGEST), where)
        if manifest.version != version:
            raise IntegrityError(f"{where} says that it is version {manifest.version}")
        return manifest

    def offered(self, version: int) -> None:
        """A reader is about to read ``version``; `replaced` compares with what is there now."""
        self._seen = version, self._stamp(version)

    def replaced(self, version: int, run_id: str) -> bool:
        """Whether ``version``, read as one of the run ``run_id``, is another run's now: a number says that of no root.

        Somebody may have emptied the root, and the next run got as far. What is there is read only when it was put
        anew. Versions without a manifest of ours name no run.

        Raises:
            FileNotFoundError: it is gone meanwhile.
            IntegrityError: its manifest is damaged.
        """
        seen = version, self._stamp(version)
        if seen[1] is None or seen == self._seen:
            return False
        key = f"{version_name(version)}/{MANIFEST}"
        found = read_manifest(self.store.get_at_most(key, LARGEST), f"{self.store.url}/{key}")
        if found.run_id == run_id:
            self._seen = seen
        return found.run_id != run_id

    def _stamp(self, version: int) -> str | None:
        return self.store.stamp(f"{version_name(version)}/{MANIFEST}")

    def prune(self, before: int) -> None:
        """Remove versions older than ``before``; what cannot be removed is logged, since newer ones serve already."""
        try:
            numbers = self.numbers()
        except StoreError as error:
            log.warning("old weights versions stay: %s", error)
            return
        for number in numbers:
            if number < before:
                try:
                    self.store.delete(version_name(number))
                except StoreError as error:
                    log.warning("old weights version %d stays: %s", number, error)
