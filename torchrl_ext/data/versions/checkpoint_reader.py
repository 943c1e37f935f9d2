"""One published full version, open for reading: each tensor is verified before it is handed on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter

import torch
from torch import Tensor

from torchrl_ext.base.errors import IntegrityError, ManifestError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.stores.folders import read_version, version_name
from torchrl_ext.data.stores.manifest import MANIFEST, Manifest, Placed
from torchrl_ext.data.stores.store import Store
from torchrl_ext.data.stores.tensorfile import TensorFile

__all__ = ["PublishedVersion"]

_BATCH_BYTES = 8 << 20  # small tensors are read and handed over together


class PublishedVersion:
    """The manifest and the open files of one full version, which is read in ranges.

    In a directory it stays readable while it is pruned; in a remote store it is lost.

    Args:
        store: where the version is.
        number: the version.
        manifest: what it holds, where that is known; a ``checksum`` of "" is not compared.

    Raises:
        FileNotFoundError: the version is not there (any more).
        IntegrityError: its files are not what its manifest says.

    Attributes:
        number, manifest: as given, or read.
        path: where its files are: a directory, or a URL.
    """

    def __init__(self, store: Store, number: int, manifest: Manifest | None = None) -> None:
        if manifest is None:
            found = read_version(store, number)
            if found.full is None:
                raise IntegrityError(
                    f"{store.url}/{version_name(number)} is a delta",
                    expected="a full version",
                    hint="follow this root with the delta transport",
                )
            manifest = found.full
        self.number, self.manifest = number, manifest
        self._files: dict[str, TensorFile] = {}
        self._verified = False
        folder = version_name(number)
        self.path = f"{store.url}/{folder}"
        try:
            for name in sorted(set(map(attrgetter("file"), manifest.params))):
                try:
                    found_at = store.open(f"{folder}/{name}")
                except FileNotFoundError as error:
                    if MANIFEST not in store.list(folder):  # pruned in between
                        raise
                    raise IntegrityError(
                        f"{self.path}/{name} is missing",
                        expected="every file that the manifest names",
                        hint="send again",
                    ) from error
                file = self._files[name] = TensorFile(found_at)
                if file.nbytes != manifest.files[name]:
                    raise IntegrityError(
                        f"{file.path} has {file.nbytes:,} bytes",
                        expected=f"{manifest.files[name]:,}, as in the manifest",
                    )
            for placed in manifest.params:
                entry = self._files[placed.file].entries.get(placed.meta.name)
                if entry is None or entry[0] != placed.meta:
                    raise IntegrityError(f"{self.path}/{placed.file} does not hold {placed.meta}, as the manifest says")
        except BaseException:
            self.close()
            raise

    def params(self) -> tuple[ParamMeta, ...]:
        """Return the parameters of the version, in order."""
        return tuple(placed.meta for placed in self.manifest.params)

    def check(self, params: tuple[ParamMeta, ...], run_id: str | None) -> None:
        """Compare the manifest with what the trainer says that it published.

        Args:
            params: of the version.
            run_id: of the trainer, where it said so.

        Raises:
            ManifestError: names the first parameter that differs.
            IntegrityError: another trainer's run published it.
        """
        if run_id is not None and run_id != self.manifest.run_id:
            raise IntegrityError(
                f"{self.path} was published by run {self.manifest.run_id}",
                expected=f"run {run_id}, the trainer that announced it",
                hint="give each trainer its own root",
            )
        held = self.params()
        for meta, wanted in zip(held, params, strict=False):
            if meta != wanted:
                raise ManifestError(f"{self.path} holds {meta}", expected=str(wanted), state="nothing was read")
        if len(held) != len(params):
            raise ManifestError(
                f"{self.path} holds {len(held)} parameters",
                expected=str(len(params)),
                state="nothing was read",
            )

    def verify(self) -> None:
        """Verify the checksum of every tensor, unless an earlier call did.

        Raises:
            IntegrityError: names the first tensor whose bytes differ, and its file.
        """
        scratch = torch.empty(max((file.chunk_bytes for file in self._files.values()), default=0), dtype=torch.uint8)
        for placed in () if self._verified else self.manifest.params:
            self._compare(placed, self._files[placed.file].checksum(placed.meta.name, scratch))
        self._verified = True

    def pairs(self, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor in order, each verified first; the next ones are read meanwhile.

        Args:
            into: tensors to fill directly where they are contiguous and on the CPU. Then all that is yielded is
                verified first, so that damaged files change none of them.

        Raises:
            IntegrityError: names the tensor whose bytes differ, and its file.
        """
        if into:
            self.verify()
        batches = self._batches()
        with ThreadPoolExecutor(1, thread_name_prefix="torchrl-ext-read") as ahead:
            pending = ahead.submit(self._read, batches[0], into)
            for following in (*batches[1:], []):
                read = pending.result()
                pending = ahead.submit(self._read, following, into)
                while read:  # the consumer alone holds on to what it was given
                    yield read.popleft()

    def close(self) -> None:
        """Close the files. May be called twice."""
        for file in self._files.values():
            file.close()

    def _batches(self) -> list[list[Placed]]:
        """Return tensors in order, as many together as are read together."""
        batches, held = list[list[Placed]]([[]]), 0
        for placed in self.manifest.params:
            if batches[-1] and held + placed.meta.nbytes > _BATCH_BYTES:
                batches.append([])
                held = 0
            batches[-1].append(placed)
            held += placed.meta.nbytes
        return batches

    def _read(self, batch: list[Placed], into: Mapping[str, Tensor]) -> deque[tuple[str, Tensor]]:
        read = deque[tuple[str, Tensor]]()
        for placed in batch:
            target = into.get(placed.meta.name)
            direct = (
                target is not None
                and target.device.type == "cpu"
                and target.is_contiguous()
                and ParamMeta.of(placed.meta.name, target) == placed.meta
            )
            tensor, checksum = self._files[placed.file].read(placed.meta.name, target if direct else None)
            self._compare(placed, checksum)
            read.append((placed.meta.name, tensor))
        return read

    def _compare(self, placed: Placed, checksum: str) -> None:
        if placed.checksum not in ("", checksum):
            raise IntegrityError(
                f"tensor {placed.meta.name!r} in {self.path}/{placed.file} is damaged",
                expected=f"xxh3-128 {placed.checksum}, found {checksum}",
                state=f"nothing of version {self.number} was used beyond the tensors before it",
                hint="send the weights again, and check the disk",
            )
