"""Chains of versions: full keyframes, deltas that each name their base, and what may be deleted.

    weight_v000001/                 full
    weight_v000002/                 delta on 1
    weight_v000003/                 delta on 2
    weight_v000004/                 full (a keyframe), and in delta/ the delta on 3

A reader that follows reads one delta per version, keyframes or not; one that joins reads the newest keyframe and the
deltas after it. A reader that is under way says so in a lease, `readers/<id>`, and collection leaves what it needs.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from torchrl_ext.errors import IntegrityError
from torchrl_ext.stores.base import Store
from torchrl_ext.stores.delta_manifest import DeltaManifest
from torchrl_ext.stores.leases import Leases
from torchrl_ext.stores.manifest import Manifest
from torchrl_ext.stores.versions import Versions, version_name
from torchrl_ext.types import ParamMeta

__all__ = ["BESIDE", "Chain", "Foreign", "Held", "Route", "Version"]

BESIDE = "delta"

Held = tuple[str, int]
"""Run id and number of a version: numbers alone could belong to a run before."""


@dataclass(frozen=True, kw_only=True)
class Version:
    """One version of a chain: a keyframe may have both manifests, other versions have one.

    Attributes:
        full: its full manifest.
        delta: the manifest of its delta.
        folder: where the files of the delta are, under the store.
    """

    full: Manifest | None = None
    delta: DeltaManifest | None = None
    folder: str = ""

    @property
    def run_id(self) -> str:
        """The run that published it."""
        return (self.full or self.delta).run_id  # type: ignore[union-attr]

    @property
    def params(self) -> tuple[ParamMeta, ...]:
        """Every parameter, in order."""
        return tuple(row.meta for row in (self.full or self.delta).params)  # type: ignore[union-attr]


class Foreign(Protocol):
    """Reads versions that another library wrote, which have no manifest of ours."""

    def finished(self, number: int) -> bool:
        """Return whether all of a version is there, as far as whoever was not told of it can know.

        Raises:
            FileNotFoundError: there is no such version.
            IntegrityError: it is damaged.
        """

    def replaced(self, number: int, run_id: str) -> bool:
        """Return whether all of another version is there than the one that was read, under its number, as ``run_id``.

        Raises:
            FileNotFoundError: there is none, or a part of it only.
            IntegrityError: it is damaged.
        """

    def base(self, number: int) -> int | None:
        """Return the earlier version that is a version's base, 0 being the first checkpoint; None for a full version.

        Raises:
            FileNotFoundError: there is no such version, or a part of it only, and it is being written.
            IntegrityError: it is damaged, or was left unfinished.
        """

    def read(self, number: int, params: tuple[ParamMeta, ...] | None) -> Version:
        """Return a version.

        Args:
            number: the version.
            params: those of its base; None where that is the checkpoint that everything began with.

        Raises:
            FileNotFoundError: there is no such version.
            IntegrityError: it is damaged.
            ConfigError: the checkpoint that everything began with is needed, and was not given.
        """


@dataclass(frozen=True, kw_only=True)
class Route:
    """What a reader has to read.

    Attributes:
        start: the version to start from, which the reader holds: number 0 is its base checkpoint. None at a keyframe.
        keyframe: the full version to start from.
        deltas: the deltas to apply, in order, each with the folder of its files.
        nbytes: bytes of all payload files on it.
    """

    start: Held | None
    keyframe: Manifest | None
    deltas: tuple[tuple[str, DeltaManifest], ...]
    nbytes: int

    @property
    def first(self) -> int:
        """The oldest version on it, which a reader needs until it is there."""
        if self.keyframe is not None:
            return self.keyframe.version
        return self.deltas[0][1].version if self.deltas else self.start[1] if self.start else 0


class Chain:
    """The routes through the versions of a store.

    Args:
        store: where the versions are.
        foreign: reads versions without a manifest of ours.
        lease_s: how long a reader's lease holds, in seconds; a reader that takes longer starts over.
    """

    def __init__(self, store: Store, *, foreign: Foreign | None = None, lease_s: float = 600.0) -> None:
        self.store, self.versions, self.leases = store, Versions(store), Leases(store, lease_s)
        self._foreign = foreign
        self._known: dict[int, Version] = {}
        self._keyframes: dict[int, bool] = {}

    def latest(self) -> int:
        """Return the newest version: what the pointer says, else the newest that another library completed, or 0.

        Raises:
            IntegrityError: the pointer holds something else than a number.
        """
        pointed = self.versions.latest()
        if pointed or self._foreign is None:
            return pointed
        for number in reversed(self.versions.numbers()):
            with suppress(FileNotFoundError):
                if self._foreign.finished(number):
                    return number
        return 0

    def replaced(self, number: int, run_id: str) -> bool:
        """Return whether a version, read as one of the run ``run_id``, is another one now; only then is it read.

        Raises:
            FileNotFoundError: it is gone meanwhile, or a part of it only is there.
            IntegrityError: it is damaged.
        """
        if self.versions.replaced(number, run_id):
            return True
        return self._foreign is not None and self._foreign.replaced(number, run_id)

    def version(self, number: int) -> Version:
        """Return what a version is.

        Raises:
            FileNotFoundError: there is no such version (any more).
            IntegrityError: its manifest is damaged, or says that it is another version.
        """
        if number not in self._known:
            try:
                self._known[number] = self._own(number)
            except FileNotFoundError:
                if self._foreign is None:
                    raise
                self._read_foreign(self._foreign, number)
        return self._known[number]

    def _own(self, number: int) -> Version:
        folder, found = version_name(number), self.versions.manifest(number)
        if isinstance(found, DeltaManifest):
            return Version(delta=found, folder=folder)
        try:
            beside = self.versions.manifest(number, f"/{BESIDE}")
        except FileNotFoundError:
            return Version(full=found)
        if not isinstance(beside, DeltaManifest):
            raise IntegrityError(f"{self.store.url}/{folder}/{BESIDE} holds a full version, and no delta")
        return Version(full=found, delta=beside, folder=f"{folder}/{BESIDE}")

    def _read_foreign(self, foreign: Foreign, number: int) -> None:
        """Their deltas do not say what does not change, so what a version holds is known from its base on only."""
        below, at = [], number
        while at not in self._known:
            try:
                base = foreign.base(at)
            except FileNotFoundError as error:
                if at == number:
                    raise
                raise IntegrityError(
                    f"{version_name(at)} in {self.store.url}, to which version {number} leads back, is missing",
                    state="nothing was read",
                ) from error
            below.append((at, base))
            if not base:
                break
            at = base
            with suppress(FileNotFoundError):
                self._known[at] = self._known.get(at) or self._own(at)
        for version, base in reversed(below):
            self._known[version] = foreign.read(version, self.version(base).params if base else None)

    def forget(self) -> None:
        """Look at the store again: its versions may be those of another run."""
        self._known.clear()
        self._keyframes.clear()

    def route(self, target: int, held: Held | None = None, *, based: bool = False) -> Route:
        """Return the route to ``target`` that reads the fewest bytes.

        Args:
            target: the version to get to.
            held: the version that the reader holds.
            based: the reader has the checkpoint that is version 0, from which it starts where nothing else will do.

        Raises:
            FileNotFoundError: ``target`` is not there (any more).
            IntegrityError: a link is missing, and neither a keyframe nor the version held lies after it; names it.
        """
        deltas: list[tuple[str, DeltaManifest]] = []
        best: Route | None = None
        number, nbytes = target, 0
        while True:
            base_run = deltas[-1][1].base_run_id if deltas else ""
            if held is not None and number == held[1]:
                if not base_run and number:
                    with suppress(FileNotFoundError, IntegrityError):  # where it can still be found out
                        base_run = self.version(number).run_id
                if base_run in ("", held[0]):
                    if best is None or nbytes < best.nbytes:
                        best = Route(start=held, keyframe=None, deltas=tuple(reversed(deltas)), nbytes=nbytes)
                    break
            if based and deltas and not number and best is None:
                best = Route(start=(base_run, 0), keyframe=None, deltas=tuple(reversed(deltas)), nbytes=nbytes)
                break
            try:
                version = self.version(number)
            except FileNotFoundError:
                if not deltas:
                    raise
                break
            except IntegrityError:
                if best is not None:  # what lies below the keyframe need not be right
                    break
                raise
            if deltas and deltas[-1][1].base_run_id not in ("", version.run_id):
                if best is not None:
                    break
                raise IntegrityError(
                    f"version {deltas[-1][1].version} in {self.store.url} is a delta on version {number} of run "
                    f"{deltas[-1][1].base_run_id!r}",
                    expected=f"run {version.run_id!r}, which published version {number} there",
                    state="nothing was read",
                    hint="let the trainer publish a keyframe",
                )
            if version.full is not None and best is None:
                total = nbytes + sum(version.full.files.values())
                best = Route(start=None, keyframe=version.full, deltas=tuple(reversed(deltas)), nbytes=total)
            if version.delta is None or (best is not None and (held is None or number <= held[1])):
                break
            deltas.append((version.folder, version.delta))
            number, nbytes = version.delta.base_version, nbytes + version.delta.nbytes
            if best is not None and nbytes > best.nbytes:
                break  # further down it gets no shorter
        if best is None:
            raise IntegrityError(
                f"version {target} in {self.store.url} cannot be reached: {version_name(number)}, the base of version "
                f"{deltas[-1][1].version if deltas else target}, is missing",
                expected="a keyframe, or deltas from the version that the reader holds"
                + (f" ({held[1]})" if held is not None else ""),
                state="nothing was read",
                hint="wait for the next keyframe, or let the trainer publish one",
            )
        return best

    def collect(self, keep_keyframes: int = 1) -> list[int]:
        """Remove versions that neither the newest keyframes nor readers under way need.

        Args:
            keep_keyframes: how many of the newest keyframes stay, with everything after the oldest of them.

        Returns:
            The versions that were removed.
        """
        keyframes, numbers = 0, self.versions.numbers()
        needed = numbers[0] if numbers else 0
        for number in reversed(numbers):
            if number not in self._keyframes:
                with suppress(FileNotFoundError, IntegrityError):
                    self._keyframes[number] = self.version(number).full is not None
                    self._known.pop(number)  # a long chain's manifests are not kept for this
            keyframes += self._keyframes.get(number, False)
            if keyframes >= keep_keyframes:
                needed = number
                break
        removed = self.versions.prune(before=min([needed, *self.leases.firsts()]))
        for number in removed:
            self._known.pop(number, None)
            self._keyframes.pop(number, None)
        return removed
