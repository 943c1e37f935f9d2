"""The words in which ways through a chain of versions are said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torchrl_ext.stores.delta_manifest import DeltaManifest
from torchrl_ext.stores.manifest import Manifest
from torchrl_ext.types import ParamMeta

__all__ = ["Foreign", "Found", "Held", "Route"]

Held = tuple[str, int]
"""Run id and number of a version: numbers alone could belong to a run before."""


Found = tuple[Manifest | None, "tuple[str, DeltaManifest] | None"]
"""The full manifest of a version, and its delta: (folder, manifest). A keyframe has both, other versions one."""


class Foreign(Protocol):
    """Reads versions that another library wrote, which have no manifest of ours."""

    def finished(self, number: int) -> bool:
        """Whether all of a version is there, as far as whoever was not told of it can know.

        Raises:
            FileNotFoundError: there is no such version.
            IntegrityError: it is damaged.
        """

    def replaced(self, number: int, run_id: str) -> bool:
        """Whether all of another version is there than the one that was read, under its number, as ``run_id``.

        Raises:
            FileNotFoundError: there is none, or a part of it only.
            IntegrityError: it is damaged.
        """

    def base(self, number: int) -> int | None:
        """The earlier version that is a version's base, 0 being the first checkpoint; None for a full version.

        Raises:
            FileNotFoundError: there is no such version, or a part of it only, and it is being written.
            IntegrityError: it is damaged, or was left unfinished.
        """

    def read(self, number: int, params: tuple[ParamMeta, ...]) -> Found:
        """A version; ``params`` are those of its base.

        Raises:
            FileNotFoundError: there is no such version.
            IntegrityError: it is damaged.
        """

    def start(self) -> tuple[ParamMeta, ...]:
        """Parameters of the checkpoint that everything began with.

        Raises:
            ConfigError: it was not given.
        """


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
