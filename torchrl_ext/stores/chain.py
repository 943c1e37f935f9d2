"""Chains of versions: full keyframes, deltas that each name their base, and what may be deleted.

    weight_v000001/                 full
    weight_v000002/                 delta on 1
    weight_v000003/                 delta on 2
    weight_v000004/                 full (a keyframe), and in delta/ the delta on 3

A reader that follows reads one delta per version, keyframes or not; one that joins reads the newest keyframe and the
deltas after it. A reader that is under way says so in a lease, `readers/<id>`, and collection leaves what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

import xxhash

from torchrl_ext.errors import IntegrityError
from torchrl_ext.stores.base import Store
from torchrl_ext.stores.delta_manifest import DeltaManifest, read_manifest
from torchrl_ext.stores.leases import Leases
from torchrl_ext.stores.manifest import LARGEST, MANIFEST, Manifest
from torchrl_ext.stores.routes import Foreign, Found, Held, Route
from torchrl_ext.stores.versions import Versions, version_name
from torchrl_ext.types import ParamMeta

__all__ = ["BESIDE", "Chain"]

BESIDE = "delta"
_PARSED = 2  # manifests that are kept for whoever looks again: of a keyframe and its delta


class Chain:
    """Ways through the versions of a store.

    Args:
        store: where the versions are.
        foreign: reads versions without a manifest of ours.
        lease_s: how long a reader's lease holds, in seconds; a reader that takes longer starts over.
    """

    def __init__(self, store: Store, *, foreign: Foreign | None = None, lease_s: float = 600.0) -> None:
        self.store, self.versions = store, Versions(store)
        self._foreign, self._leases = foreign, Leases(store, lease_s)
        self._known: dict[int, Found] = {}
        self._keyframes: dict[int, bool] = {}
        self._parsed: dict[bytes, Manifest | DeltaManifest] = {}

    def latest(self) -> int:
        """The newest version: what the pointer says, else the newest that another library completed; 0 if none.

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
        """Whether a version, read as one of the run ``run_id``, is another one now. What is there is read only then.

        Raises:
            FileNotFoundError: it is gone meanwhile, or a part of it only is there.
            IntegrityError: it is damaged.
        """
        if self.versions.replaced(number, run_id):
            return True
        return self._foreign is not None and self._foreign.replaced(number, run_id)

    def version(self, number: int) -> Found:
        """What a version is.

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

    def _own(self, number: int) -> Found:
        folder = version_name(number)
        found = self._manifest(folder, number)
        if isinstance(found, DeltaManifest):
            return None, (folder, found)
        folder = f"{folder}/{BESIDE}"
        try:
            beside = self._manifest(folder, number)
        except FileNotFoundError:
            return found, None
        if not isinstance(beside, DeltaManifest):
            raise IntegrityError(f"{self.store.url}/{folder}/{MANIFEST} is that of a full version, and no delta's")
        return found, (folder, beside)

    def _manifest(self, folder: str, number: int) -> Manifest | DeltaManifest:
        """A folder's manifest. A version is looked for more than once while it is followed, and parsed once."""
        where = f"{self.store.url}/{folder}/{MANIFEST}"
        data = self.store.get_at_most(f"{folder}/{MANIFEST}", LARGEST)
        mark = xxhash.xxh3_128_digest(data)
        found = self._parsed.pop(mark, None) or read_manifest(data, where)
        if found.version != number:
            raise IntegrityError(f"{where} says that it is version {found.version}")
        self._parsed[mark] = found  # the newest last
        while len(self._parsed) > _PARSED:
            del self._parsed[next(iter(self._parsed))]
        return found

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
            below.append(at)
            if not base:
                break
            at = base
            with suppress(FileNotFoundError):
                self._known[at] = self._known.get(at) or self._own(at)
        for version in reversed(below):
            base = foreign.base(version)
            params = () if base is None else self.params(base) if base else foreign.start()
            self._known[version] = foreign.read(version, params)

    def run_id(self, number: int) -> str:
        """The run that published a version; raises as `version`."""
        full, delta = self.version(number)
        return full.run_id if full is not None else delta[1].run_id  # type: ignore[index]

    def _run_there(self, number: int) -> str:
        """The run that published a version, where that can still be found out, else ""."""
        with suppress(FileNotFoundError, IntegrityError):
            return self.run_id(number) if number else ""
        return ""

    def params(self, number: int) -> tuple[ParamMeta, ...]:
        """Every parameter of a version; raises as `version`."""
        full, delta = self.version(number)
        return tuple(param.meta for param in (full.params if full is not None else delta[1].params))  # type: ignore[index]

    def forget(self) -> None:
        """Look at the store again: its versions may be those of another run."""
        self._known.clear()
        self._keyframes.clear()

    def back(self, target: int) -> Iterator[tuple[str, DeltaManifest]]:
        """The deltas that lead to ``target``, the last one first, as far as there is no keyframe and no gap.

        Raises:
            FileNotFoundError: ``target`` is not there (any more).
            IntegrityError: a manifest is damaged.
        """
        number = target
        while number:
            try:
                full, delta = self.version(number)
            except FileNotFoundError:
                if number == target:
                    raise
                return
            if delta is not None:
                yield delta
            if full is not None or delta is None:
                return
            number = delta[1].base_version

    def origin(self, target: int) -> DeltaManifest | None:
        """The delta on version 0 that leads, with those after it and without a keyframe between, to ``target``.

        Raises:
            FileNotFoundError: ``target`` is not there (any more).
            IntegrityError: a manifest is damaged.
        """
        deltas = list(self.back(target))
        first = deltas[-1][1] if deltas else None
        keyframe = first is not None and self.version(first.version)[0] is not None
        return first if first is not None and first.base_version == 0 and not keyframe else None

    def route(self, target: int, held: Held | None = None) -> Route:
        """The way to ``target`` that reads the fewest bytes.

        Args:
            target: the version to get to.
            held: the version that the reader holds.

        Raises:
            FileNotFoundError: ``target`` is not there (any more).
            IntegrityError: a link is missing, and neither a keyframe nor the version held lies after it; names it.
        """
        deltas: list[tuple[str, DeltaManifest]] = []
        routes: list[Route] = []
        number, missing = target, None
        while True:
            if held is not None and number == held[1]:
                run = (deltas and deltas[-1][1].base_run_id) or self._run_there(number)
                if run in ("", held[0]):
                    routes.append(Route(keyframe=None, deltas=tuple(reversed(deltas))))
                    break
            try:
                full, delta = self.version(number)
            except FileNotFoundError:
                if not deltas:
                    raise
                missing = number
                break
            except IntegrityError:
                if routes:  # what lies below the keyframe need not be right
                    break
                raise
            if deltas and deltas[-1][1].base_run_id not in ("", self.run_id(number)):
                if not routes:
                    raise IntegrityError(
                        f"version {deltas[-1][1].version} in {self.store.url} is a delta on version {number} of run "
                        f"{deltas[-1][1].base_run_id!r}",
                        expected=f"run {self.run_id(number)!r}, which published version {number} there",
                        state="nothing was read",
                        hint="let the trainer publish a keyframe",
                    )
                break
            if full is not None and not any(route.keyframe for route in routes):
                routes.append(Route(keyframe=full, deltas=tuple(reversed(deltas))))
            if delta is None or (routes and (held is None or number <= held[1])):
                break
            deltas.append(delta)
            number = delta[1].base_version
            if routes and sum(manifest.nbytes for _, manifest in deltas) > routes[0].nbytes:
                break  # further down it gets no shorter
        if not routes:
            raise IntegrityError(
                f"version {target} in {self.store.url} cannot be reached: {version_name(missing or number)}, the base "
                f"of version {deltas[-1][1].version if deltas else target}, is missing",
                expected="a keyframe, or deltas from the version that the reader holds"
                + (f" ({held[1]})" if held is not None else ""),
                state="nothing was read",
                hint="wait for the next keyframe, or let the trainer publish one",
            )
        return min(routes, key=lambda route: route.nbytes)

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
            with suppress(FileNotFoundError, IntegrityError):
                keyframes += self._is_keyframe(number)
            if keyframes >= keep_keyframes:
                needed = number
                break
        needed = min([needed, *self._leases.firsts()])
        removed = [number for number in numbers if number < needed]
        self.versions.prune(before=needed)
        for number in removed:
            self._known.pop(number, None)
            self._keyframes.pop(number, None)
        return removed

    def _is_keyframe(self, number: int) -> bool:
        if number not in self._keyframes:
            self._keyframes[number] = self.version(number)[0] is not None
            self._known.pop(number, None)  # a long chain's manifests are not kept for this
        return self._keyframes[number]

    @contextmanager
    def lease(self, route: Route) -> Iterator[None]:
        """Keep collection away from ``route`` while the block reads it.

        A store that this process may not write to gives no lease: the reader starts over when something is gone.
        """
        steps = [route.keyframe.version] if route.keyframe is not None else []
        steps += [delta.version for _, delta in route.deltas]
        with self._leases.held(min(steps)) if steps else nullcontext():
            yield
