"""Versions in a store: full ones, deltas that each name their base, the pointer to the newest, and what may be deleted.

    latest                          number of the newest version, and its run; moved last, and never back
    weight_v000001/...              files of one version, here a full one
    weight_v000001/manifest.json    its last file: a directory without one is not a version
    weight_v000002/                 delta on 1
    weight_v000003/                 delta on 2
    weight_v000004/                 full (a keyframe), and the delta on 3

A reader that follows reads one delta per version, keyframes or not; one that joins reads the newest keyframe and the
deltas after it. Nothing is ever rewritten in place. A reader that has a version's files open may read on while it is
removed; one that comes too late sees `FileNotFoundError` and takes the route again, from the newest keyframe.

In a store without locks the pointer could be put late by a writer that has lost the root. There the newest complete
version counts, which is as good: its manifest was put last, and nobody removes it before there is a newer one.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass

from torchrl_ext.base.errors import IntegrityError, StoreError
from torchrl_ext.base.types import label_number
from torchrl_ext.data.stores.manifest import (
    LARGEST,
    MANIFEST,
    DeltaManifest,
    Manifest,
    RunVersion,
    version_name,
    version_number,
)  # fmt: skip
from torchrl_ext.data.stores.store import Store

__all__ = ["Chain", "Route"]

log = logging.getLogger("torchrl_ext")

_LATEST = "latest"
_LONGEST = 64  # bytes


@dataclass(frozen=True, kw_only=True)
class Route:
    """The keyframe and the deltas that a reader has to read to get to a version.

    Attributes:
        start: the version to start from, which the reader holds: number 0 is its base checkpoint. None at a keyframe.
        keyframe: the full version to start from.
        deltas: the deltas to apply, in order, each with the folder of its files.
        nbytes: bytes of all files on the route but manifests.
    """

    start: RunVersion | None
    keyframe: Manifest | None
    deltas: tuple[tuple[str, DeltaManifest], ...]
    nbytes: int


class Chain:
    """A chain of versions in a store, which one writer appends to and any number of readers follow.

    Args:
        store: where the versions are; one writer at a time.
        run_id: names the run of the writer.

    Attributes:
        known: the versions that were read, by number. Clear it to read them again, where another run may have replaced
            them.
    """

    def __init__(self, store: Store, run_id: str = "") -> None:
        self.store, self.run_id = store, run_id
        self.known: dict[int, Manifest] = {}
        self._keyframes: dict[int, bool] = {}
        self._published, self._seen = 0, ""

    # which versions there are

    def numbers(self) -> list[int]:
        """Return the numbers of all versions in the store, oldest first."""
        return sorted(number for number in map(version_number, self.store.list()) if number is not None)

    def newest(self) -> int:
        """Return the highest number that was used here, whether the pointer moved or not; 0 before the first.

        Those that this object published count where they are gone, too: in one run, a number stands for one version.
        """
        return max([self._published, self._pointed()[1], *self.numbers()])

    def latest(self) -> int:
        """Return the number of the newest published version; 0 before the first.

        Raises:
            IntegrityError: the pointer holds something else.
        """
        return self.head()[1]

    def head(self) -> RunVersion:
        """Return run and number of the newest version, as `latest`; the run is "" where nothing names it."""
        run, number = self._pointed()
        while number and (newer := self._newer(number)):
            with suppress(FileNotFoundError):  # removed meanwhile: a newer one is there
                return self._read(newer).run_id, newer
        return run, number

    def own(self) -> None:
        """Own the store, as `Store.own`, before each version.

        Raises:
            StoreError: as `Store.own`, or another trainer published into it since this one began.
        """
        begins = not self.store.owned
        self.store.own()
        run, _ = self.head()
        if begins:
            self._seen = run
        if run not in ("", self._seen):
            raise StoreError(
                f"run {run} publishes into {self.store.url}, where this trainer published before",
                expected="one trainer per root",
                state="nothing was written; this trainer no longer publishes into this root",
                hint="end one of the two, or give this trainer its own root",
            )

    def advance(self, version: int, *, keyframe: bool | None = None) -> None:
        """Move the pointer forward to ``version``.

        Args:
            version: the version, which is complete.
            keyframe: whether it is one, where the caller knows it; `collect` reads its manifest otherwise.

        Raises:
            StoreError: it is at a newer version already.
        """
        run, pointed = self._pointed()
        now = max(pointed, self._newer(version))
        if version < now:
            raise StoreError(
                f"the pointer in {self.store.url} would go back from version {now} to {version}",
                expected="increasing versions",
            )
        if (run, pointed) != (self.run_id, version):
            self.store.put(_LATEST, f"{version} {self.run_id}".rstrip().encode() + b"\n")
        self._published, self._seen = version, self.run_id
        if keyframe is not None:
            self._keyframes[version] = keyframe

    def _pointed(self) -> RunVersion:
        """Return run and number of the version that the pointer names; ("", 0) where it names none."""
        try:
            text = self.store.get(_LATEST, at_most=_LONGEST)
        except FileNotFoundError:
            return "", 0
        word, _, run = text.strip().decode(errors="replace").partition(" ")
        if word and not (word.isascii() and word.isdigit()):
            raise IntegrityError(
                f"the pointer {_LATEST!r} in {self.store.url} holds {text[:40]!r}",
                expected="a version number, and the run that published it",
                hint="write the newest version's number into it",
            )
        number = label_number(word) or 0  # it is empty while somebody copies the root, or longer than any number
        return run if number else "", number

    def _newer(self, than: int) -> int:
        """Return the newest complete version after ``than`` in a store without locks, where it may be unnamed; or 0."""
        for number in reversed(self.numbers()) if not self.store.locked else ():
            if number <= than:
                break
            if MANIFEST in self.store.list(version_name(number)):
                return number
        return 0

    # what one of them is

    def version(self, number: int) -> Manifest:
        """Return the manifest of a version, read from the store where it is not known yet.

        Raises:
            FileNotFoundError: there is no such version (any more).
            IntegrityError: its manifest is damaged, or says that it is another version.
        """
        if number not in self.known:
            self.known[number] = self._read(number)
        return self.known[number]

    def _read(self, number: int) -> Manifest:
        key = f"{version_name(number)}/{MANIFEST}"
        where = f"{self.store.url}/{key}"
        found = Manifest.from_bytes(self.store.get(key, at_most=LARGEST), where)
        if found.version != number:
            raise IntegrityError(f"{where} says that it is version {found.version}")
        return found

    # how to get to one

    def route(self, target: int, held: RunVersion | None = None, *, based: bool = False) -> Route:
        """Return the route to ``target`` that reads the fewest bytes.

        Args:
            target: the version to get to.
            held: the version that the reader holds.
            based: the reader has the checkpoint that is version 0, from which it starts where nothing else will do.

        Raises:
            FileNotFoundError: ``target`` is not there (any more).
            IntegrityError: a link is missing, and neither a keyframe nor the version held lies after it; names it.
        """
        here = self.version(target)
        number, run, nbytes, best = target, here.run_id, 0, None
        deltas: list[tuple[str, DeltaManifest]] = []  # from the target back

        def begin(start: RunVersion | None, keyframe: Manifest | None, nbytes: int) -> Route:
            return Route(start=start, keyframe=keyframe, deltas=tuple(reversed(deltas)), nbytes=nbytes)

        while best is None or nbytes <= best.nbytes:  # the way back to what is held, past the newest keyframe
            if held == (run, number):
                return begin(held, None, nbytes)
            if best is not None and (held is None or number <= held[1]):
                break
            if not number:
                best = begin((run, 0), None, nbytes) if based and best is None else best
                break
            try:
                here = self.version(number)
                if here.run_id != run:
                    raise IntegrityError(
                        f"version {deltas[-1][1].version} in {self.store.url} is a delta on version {number} of run "
                        f"{run!r}",
                        expected=f"run {here.run_id!r}, which published version {number} there",
                        state="nothing was read",
                        hint="let the trainer publish a keyframe",
                    )
            except FileNotFoundError:
                break
            except IntegrityError:
                if best is None:
                    raise
                break  # what lies below a keyframe need not be right
            if here.full is not None and best is None:
                best = begin(None, here, nbytes + here.full_bytes)
            if here.delta is None:
                break
            deltas.append((version_name(number), here.delta))
            number, run = here.delta.base_version, here.delta.base_run_id
            nbytes += sum(here.delta.files.values())
        if best is None:
            raise IntegrityError(
                f"version {target} in {self.store.url} cannot be reached: {version_name(number)}, the base of version "
                f"{deltas[-1][1].version}, is missing",
                expected="a keyframe, or deltas from the version that the reader holds"
                + (f" ({held[1]})" if held is not None else ""),
                state="nothing was read",
                hint="wait for the next keyframe, or let the trainer publish one",
            )
        return best

    # what may go

    def collect(self, keep_keyframes: int = 1) -> list[int]:
        """Remove versions before the newest keyframes; readers under way start over at the newest one.

        Args:
            keep_keyframes: how many of the newest keyframes stay, with everything after the oldest of them.

        Returns:
            The versions that were removed.
        """
        keyframes, numbers = 0, self.numbers()
        for number in reversed(numbers):
            if number not in self._keyframes:
                with suppress(FileNotFoundError, IntegrityError):
                    self._keyframes[number] = self._read(number).full is not None
            keyframes += self._keyframes.get(number, False)
            if keyframes >= keep_keyframes:
                return self.prune(before=number, numbers=numbers)
        return []

    def prune(self, before: int, numbers: list[int] | None = None) -> list[int]:
        """Remove versions older than ``before``; what cannot be removed is logged, as newer ones are in service.

        Args:
            before: the oldest version that stays.
            numbers: every version there is, where that is known.

        Returns:
            The versions that were older.
        """
        try:
            numbers = self.numbers() if numbers is None else numbers
        except StoreError as error:
            log.warning("old weights versions stay: %s", error)
            return []
        older = [number for number in numbers if number < before]
        for number in older:
            self.known.pop(number, None)
            self._keyframes.pop(number, None)
            try:
                self.store.delete(version_name(number))
            except StoreError as error:
                log.warning("old weights version %d stays: %s", number, error)
        return older
