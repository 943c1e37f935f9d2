"""The payloads of the deltas on a route: read at once where they are few, else when they are asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import xxhash

from torchrl_ext.base.errors import IntegrityError
from torchrl_ext.data.stores.manifest import MANIFEST, DeltaManifest
from torchrl_ext.data.stores.store import Store
from torchrl_ext.data.versions.containers import damaged

__all__ = ["HELD_BYTES", "SPAN_BYTES", "Payloads", "incomplete"]

HELD_BYTES = 256 << 20
"""Bound on the payloads in memory, of all deltas on a route together; one larger payload may exceed it."""

SPAN_BYTES = 1 << 20
"""Bound on the neighbouring payloads that are read at once: `HELD_BYTES` have room for a span of each of 256 deltas."""


_GAP_BYTES = 4096  # between two payloads, that are faster read than skipped


@dataclass(kw_only=True, eq=False)
class _Span:
    """Neighbouring payloads of a file, which are read at once: from ``first`` to ``end``, in bytes."""

    manifest: DeltaManifest
    folder: str
    file: str
    first: int
    end: int
    blocks: list[np.void]


class Payloads:
    """Reads payloads in spans, verifies each one, and holds no more than `HELD_BYTES` of them.

    A route whose payloads take no more than the bound is read when it is opened, and needs the store no longer. On a
    longer one, spans are read when a payload in them is asked for, and those that were used longest ago are dropped.

    Args:
        store: where the deltas are.

    Attributes:
        nbytes: bytes of all spans that were added.
    """

    def __init__(self, store: Store) -> None:
        self.store, self.nbytes = store, 0
        self._spans: list[_Span] = []
        self._held: dict[_Span, memoryview] = {}  # the one that was used last comes last
        self._lock = threading.Lock()

    @property
    def streamed(self) -> bool:
        """Whether payloads are read from the store when they are asked for."""
        return self.nbytes > HELD_BYTES

    def add(self, folder: str, manifest: DeltaManifest, numbers: Iterable[int]) -> dict[int, Callable[[], memoryview]]:
        """Add blocks of a delta; return for each a call that returns its bytes.

        The calls raise IntegrityError where a payload is damaged, or is gone from the store; it names a tensor.

        Args:
            folder: of the delta's files.
            manifest: of the delta.
            numbers: of the blocks, in ``manifest.blocks``.
        """
        found, last, names = dict[int, Callable[[], memoryview]](), None, [*manifest.files]
        places = ((number, manifest.blocks[number]) for number in numbers)
        for number, block in sorted(places, key=lambda row: (int(row[1]["file"]), int(row[1]["offset"]))):
            file, first = names[block["file"]], int(block["offset"])
            end = first + int(block["nbytes"])
            if last is None or file != last.file or first - last.end > _GAP_BYTES or end - last.first > SPAN_BYTES:
                last = _Span(manifest=manifest, folder=folder, file=file, first=first, end=first, blocks=[])
                self._spans.append(last)
            self.nbytes += max(0, end - last.end)
            last.end = max(last.end, end)
            last.blocks.append(block)
            found[number] = partial(self._payload, last, block)
        return found

    def read(self) -> None:
        """Read everything, unless it takes more than the bound.

        Raises:
            FileNotFoundError: a delta was collected.
            IntegrityError: a file is missing or too short, or a payload is damaged; names the tensor and the file.
        """
        by_file: dict[tuple[str, str], list[_Span]] = {}
        for span in () if self.streamed else self._spans:
            by_file.setdefault((span.folder, span.file), []).append(span)
        for spans in by_file.values():
            self._load(spans)

    def _payload(self, span: _Span, block: np.void) -> memoryview:
        with self._lock:
            if span not in self._held:
                used, size = sum(map(len, self._held.values())), span.end - span.first
                while self._held and used + size > HELD_BYTES:
                    used -= len(self._held.pop(next(iter(self._held))))
                try:
                    self._load([span])
                except FileNotFoundError as error:
                    raise incomplete(f"{self.store.url}/{span.folder}", span.file, span.manifest, None) from error
            data = self._held[span] = self._held.pop(span)
        return _bytes_of(block, data, span)

    def _load(self, spans: list[_Span]) -> None:
        """Read spans of one file, and verify the payloads in them."""
        folder, file, manifest = spans[0].folder, spans[0].file, spans[0].manifest
        where = f"{self.store.url}/{folder}"
        try:
            ranges = [(span.first, span.end - span.first) for span in spans]
            read = self.store.ranges(f"{folder}/{file}", ranges)
        except FileNotFoundError as error:
            if MANIFEST not in self.store.list(folder):  # collected in between
                raise
            raise incomplete(where, file, manifest, None) from error
        for span, data in zip(spans, read, strict=True):
            view = memoryview(data)
            for block in span.blocks:
                payload, stated = _bytes_of(block, view, span), int(block["checksum"])
                if len(payload) != block["nbytes"]:
                    raise incomplete(where, file, manifest, span.first + len(data), _name(manifest, block))
                if xxhash.xxh3_64_intdigest(payload) != stated:
                    found, path = xxhash.xxh3_64_hexdigest(payload), f"{where}/{file}"
                    raise damaged(_name(manifest, block), path, f"{stated:016x}", found, manifest.version)
            self._held[span] = view


def _bytes_of(block: np.void, data: memoryview, span: _Span) -> memoryview:
    return data[int(block["offset"]) - span.first :][: int(block["nbytes"])]


def _name(manifest: DeltaManifest, block: np.void) -> str:
    """Return the name of the first tensor that a block changes."""
    stream = manifest.table.streams[block["stream"]]
    return manifest.params[stream.params[stream.within(int(block["start"]), int(block["start"]) + 1)[0]]].name


def incomplete(
    where: str, file: str, manifest: DeltaManifest, found: int | None, name: str | None = None
) -> IntegrityError:
    """Return the error for a file of a delta that is missing or ends early; it names a tensor in the file.

    Args:
        where: the folder, for messages.
        file: its name.
        manifest: of the delta.
        found: the bytes that there are; None where the file is missing.
        name: the tensor; by default the first one that cannot be read.
    """
    if name is None:
        rows = manifest.blocks[manifest.blocks["file"] == [*manifest.files].index(file)]
        lost = rows[rows["offset"] + rows["nbytes"] > (found or 0)]
        placed = (tensor for tensor, one in manifest.placed.items() if one == file)
        name = _name(manifest, lost[0]) if lost.size else next(placed, None)
    if found is None:
        what = f"{where}/{file} is missing" + (f", which holds tensor {name!r}" if name else "")
        expected, hint = "every file that the manifest names", "let the trainer publish again"
    else:
        what = f"{where}/{file} has {found} bytes" + (f", so that tensor {name!r} cannot be read" if name else "")
        expected, hint = (
            f"{manifest.files[file]}, as in the manifest",
            "let the trainer publish again, and check the disk",
        )
    return IntegrityError(what, expected=expected, state=f"nothing of version {manifest.version} was used", hint=hint)
