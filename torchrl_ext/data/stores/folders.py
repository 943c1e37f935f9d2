"""One version in a store: its name and its manifests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from operator import attrgetter

from torchrl_ext.base.errors import IntegrityError, StoreError
from torchrl_ext.base.types import VERSIONS, ParamMeta
from torchrl_ext.data.stores.manifest import LARGEST, MANIFEST, DeltaManifest, Manifest, read_manifest
from torchrl_ext.data.stores.store import Store

__all__ = ["BESIDE", "RunVersion", "Version", "read_version", "version_name", "version_number"]

BESIDE = "delta"
"""The folder of a keyframe that holds its delta."""

_NAME = re.compile(r"weight_v(\d{6}|[1-9]\d{6,17})", re.ASCII)
"""Matches the names of version directories; its group is the number."""

RunVersion = tuple[str, int]
"""The run id and the number of a version; the number alone could be that of an earlier run."""


def version_name(version: int) -> str:
    """Return the directory of a version: 7 -> ``"weight_v000007"``.

    Raises:
        StoreError: the number is negative or has more digits than a name takes.
    """
    if not 0 <= version < VERSIONS:
        raise StoreError(
            f"{version} cannot be the number of a version",
            expected=f"a number below {VERSIONS}",
            state="nothing was written",
            hint="an engine's label, the pointer 'latest' or a caller gave the number before; correct that one",
        )
    return f"weight_v{version:06d}"


def version_number(name: str) -> int | None:
    """Return the version of a directory: ``"weight_v000007"`` -> 7; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


@dataclass(frozen=True, kw_only=True)
class Version:
    """One version of a chain: a keyframe may have both manifests, other versions have one.

    Attributes:
        run_id: the run that published it.
        params: every parameter, in order.
        full: its full manifest.
        delta: the manifest of its delta.
        folder: where the files of the delta are, under the store.
    """

    run_id: str
    params: tuple[ParamMeta, ...]
    full: Manifest | None = None
    delta: DeltaManifest | None = None
    folder: str = ""


def read_version(store: Store, number: int) -> Version:
    """Return a version, from its manifests.

    Raises:
        FileNotFoundError: there is no such version (any more).
        IntegrityError: its manifest is damaged, or says that it is another version.
    """
    full, delta, folder = None, None, version_name(number)
    for inside in (folder, f"{folder}/{BESIDE}"):
        key = f"{inside}/{MANIFEST}"
        try:
            data = store.get(key, at_most=LARGEST)
        except FileNotFoundError:
            if full is None:
                raise
            break
        found = read_manifest(data, f"{store.url}/{key}")
        if found.version != number:
            raise IntegrityError(f"{store.url}/{key} says that it is version {found.version}")
        if isinstance(found, DeltaManifest):
            delta, folder = found, inside
            break
        if full is not None:
            raise IntegrityError(f"{store.url}/{inside} holds a full version, not a delta")
        full = found
    params = found.params if isinstance(found, DeltaManifest) else tuple(map(attrgetter("meta"), found.params))
    return Version(run_id=found.run_id, params=params, full=full, delta=delta, folder=folder if delta else "")
