"""Chains of versions: full keyframes, deltas that each name their base, and what may be deleted.

    weight_v000001/                 full
    weight_v000002/                 delta on 1
    weight_v000003/                 delta on 2
    weight_v000004/                 full (a keyframe), and in delta/ the delta on 3

A reader that follows reads one delta per version, keyframes or not; one that joins reads the newest keyframe and the
deltas after it. A reader that is under way says so in a lease, `readers/<id>`, and collection leaves what it needs.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from torchrl_ext.errors import IntegrityError, StoreError
from torchrl_ext.stores.base import Store
from torchrl_ext.stores.deltas import DELTA_FORMAT, DeltaManifest
from torchrl_ext.stores.manifest import MANIFEST, Manifest
from torchrl_ext.stores.versions import Versions, version_name
from torchrl_ext.types import ParamMeta

__all__ = ["BESIDE", "Chain", "Held", "Route"]

BESIDE = "delta"
_LEASES = "readers"

Held = tuple[str, int]
"""Run id and number of a version: numbers alone could belong to a run before."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """What a reader has to read.

    Attributes:
        keyframe: the full version to start from; None to start from what the reader holds.
        deltas: the deltas to apply, in order, each with the folder of its files.
    """

    keyframe: Manifest | None
    deltas: tuple[tuple[str, DeltaManifest], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all payload files on the way."""
        full = 0 if self.keyframe is None else sum(self.keyframe.files.values())
        return full + sum(delta.nbytes for _, delta in self.deltas)


class Chain:
    """Ways through the versions of a store.

    Args:
        store: where the versions are.
        lease_s: how long a reader's lease holds, in seconds; a reader that takes longer starts over.
    """

    def __init__(self, store: Store, *, lease_s: float = 600.0) -> None:
        self.store, self.versions = store, Versions(store)
        self._lease_s = lease_s
        self._known: dict[int, tuple[Manifest | None, tuple[str, DeltaManifest] | None]] = {}

    def version(self, number: int) -> tuple[Manifest | None, tuple[str, DeltaManifest] | None]:
        """The full manifest of a version and its delta (folder, manifest); a keyframe has both, other versions one.

        Raises:
            FileNotFoundError: there is no such version (any more).
            IntegrityError: its manifest is damaged, or says that it is another version.
        """
        if number not in self._known:
            folder = version_name(number)
            data = self.store.get(f"{folder}/{MANIFEST}")
            where = f"{self.store.url}/{folder}/{MANIFEST}"
            full, delta = None, None
            if _is_delta(data):
                delta = (folder, DeltaManifest.from_bytes(data, where))
            else:
                full = Manifest.from_bytes(data, where)
                folder = f"{folder}/{BESIDE}"
                with suppress(FileNotFoundError):
                    beside = self.store.get(f"{folder}/{MANIFEST}")
                    delta = (folder, DeltaManifest.from_bytes(beside, f"{self.store.url}/{folder}/{MANIFEST}"))
            for found in (full, delta and delta[1]):
                if found is not None and found.version != number:
                    raise IntegrityError(f"{where} says that it is version {found.version}")
            self._known[number] = (full, delta)
        return self._known[number]

    def run_id(self, number: int) -> str:
        """The run that published a version; raises as `version`."""
        full, delta = self.version(number)
        return full.run_id if full is not None else delta[1].run_id  # type: ignore[index]

    def params(self, number: int) -> tuple[ParamMeta, ...]:
        """Every parameter of a version; raises as `version`."""
        full, delta = self.version(number)
        return tuple(param.meta for param in (full.params if full is not None else delta[1].params))  # type: ignore[index]

    def forget(self) -> None:
        """Look at the store again: its versions may be those of another run."""
        self._known.clear()

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
            if held is not None and number == held[1] and (not deltas or deltas[-1][1].base_run_id == held[0]):
                if deltas or self.run_id(number) == held[0]:
                    routes.append(Route(keyframe=None, deltas=tuple(reversed(deltas))))
                    break
            try:
                full, delta = self.version(number)
            except FileNotFoundError:
                if not deltas:
                    raise
                missing = number
                break
            if full is not None and not any(route.keyframe for route in routes):
                routes.append(Route(keyframe=full, deltas=tuple(reversed(deltas))))
            if delta is None or (routes and (held is None or number <= held[1])):
                break
            deltas.append(delta)
            number = delta[1].base_version
        if not routes:
            raise IntegrityError(
                f"version {target} in {self.store.url} cannot be reached: {version_name(missing or number)}, the base of "
                f"version {deltas[-1][1].version if deltas else target}, is missing",
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
                keyframes += self.version(number)[0] is not None
            if keyframes >= keep_keyframes:
                needed = number
                break
        needed = min([needed, *self._leased()])
        removed = [number for number in numbers if number < needed]
        self.versions.prune(before=needed)
        for number in removed:
            self._known.pop(number, None)
        return removed

    @contextmanager
    def lease(self, route: Route) -> Iterator[None]:
        """Keep collection away from ``route`` while the block reads it.

        A store that this process may not write to gives no lease: the reader starts over when something is gone.
        """
        steps = [route.keyframe.version] if route.keyframe is not None else []
        steps += [delta.version for _, delta in route.deltas]
        key = f"{_LEASES}/{uuid.uuid4().hex}"
        if not steps:
            yield
            return
        with suppress(StoreError):
            self.store.put(key, json.dumps({"first": min(steps), "until": time.time() + self._lease_s}).encode())
        try:
            yield
        finally:
            with suppress(StoreError):
                self.store.delete(key)

    def _leased(self) -> list[int]:
        found = []
        for name in self.store.list(_LEASES):
            with suppress(FileNotFoundError, StoreError, ValueError, TypeError, KeyError):
                lease = json.loads(self.store.get(f"{_LEASES}/{name}"))
                if float(lease["until"]) > time.time():
                    found.append(int(lease["first"]))
                else:  # its reader died, or takes longer than it said
                    self.store.delete(f"{_LEASES}/{name}")
        return found


def _is_delta(manifest: bytes) -> bool:
    try:
        return json.loads(manifest).get("format") == DELTA_FORMAT
    except (ValueError, AttributeError, RecursionError):
        return False
