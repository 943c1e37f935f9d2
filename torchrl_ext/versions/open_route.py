"""A route through a chain, open for reading: collection cannot take away what has still to be read of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Protocol

from torch import Tensor

from torchrl_ext.codecs.patch import Patch, apply_patch, fold
from torchrl_ext.codecs.pipeline import decode_tensors, worker_threads
from torchrl_ext.errors import IntegrityError, ManifestError
from torchrl_ext.registry import containers
from torchrl_ext.stores.chain import Chain, Route
from torchrl_ext.stores.manifest import MANIFEST, DeltaManifest, Manifest
from torchrl_ext.stores.versions import Held
from torchrl_ext.types import ParamMeta
from torchrl_ext.versions.containers import Container, Decode
from torchrl_ext.versions.payloads import Payloads, incomplete
from torchrl_ext.versions.shards.parts import CONTAINER, Wanted, read_parts
from torchrl_ext.weights.digests import position_digest
from torchrl_ext.weights.source import WeightSource

__all__ = ["FullVersion", "OpenBase", "OpenFull", "OpenRoute", "same_base"]


class FullVersion(Protocol):
    """A keyframe, open for reading."""

    def params(self) -> tuple[ParamMeta, ...]:
        """Return the parameters that it holds, in order."""

    def pairs(self, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor in order, each verified first, and read into that of ``into`` where it fits."""

    def close(self) -> None:
        """Release its files or its memory. May be called twice."""


OpenFull = Callable[[int, Manifest], FullVersion]
OpenBase = Callable[[], WeightSource]


class OpenRoute:
    """A route with its keyframe open, and with its deltas read, or read while the route is used where they are many.

    Memory for payloads is bounded by `torchrl_ext.versions.payloads`, however many versions the route leads through.

    Args:
        chain: the versions.
        route: the route to open.
        target: where it leads.
        open_full: opens a keyframe.
        held: the version that the reader holds.
        base: opens what version 0 is, for a reader that holds nothing that it could start from.
        wanted: which blocks of parameters are read, where the route starts from what the reader holds and the trainer's
            ranks wrote parts; None for all.

    Attributes:
        held: the version that the reader holds, where the route starts from it.
        reached: run id and number of the version that it leads to.
        params: every parameter there.
        deltas: the folder of each delta, its manifest, and what decodes the change of each parameter.
        keyframe: the manifest of the keyframe that it starts from.
        published: that keyframe, its files open.
        base: what stands in for a keyframe where the route starts at version 0.
        digests: position digest of every tensor where the route ends, by name; none where it ends at a keyframe.
    """

    def __init__(
        self,
        chain: Chain,
        route: Route,
        target: int,
        open_full: OpenFull,
        held: Held | None,
        base: OpenBase | None,
        wanted: Wanted | None = None,
    ) -> None:
        end = chain.version(target)
        self.held = held if route.start == held else None
        self.reached, self.params = (end.run_id, target), end.params
        self.base = base() if base is not None and route.start is not None and self.held is None else None
        self.keyframe = route.keyframe
        self.published = None if route.keyframe is None else open_full(route.keyframe.version, route.keyframe)
        self.deltas: list[tuple[str, DeltaManifest, Mapping[str, Decode]]] = []
        self._changed: set[str] = set()
        self._wanted: Wanted = wanted if wanted is not None and self.held is not None else _all
        self.digests: dict[str, str] = {}
        self._payloads, self._whole_bytes = Payloads(chain.store), 0
        self._leases = ExitStack()
        try:
            for folder, manifest in route.deltas:
                decoders = self._decoders(chain, folder, manifest)
                self.deltas.append((f"{chain.store.url}/{folder}", manifest, decoders))
                self._changed |= decoders.keys()
            self._payloads.read()
        except BaseException:
            self.close()
            raise
        for row in self.deltas[-1][1].params if self.deltas else ():
            if row.digest:  # another library's have none
                self.digests[row.meta.name] = row.digest

    def _decoders(self, chain: Chain, folder: str, manifest: DeltaManifest) -> Mapping[str, Decode]:
        """Return what decodes the change of each parameter in a delta, as far as it is wanted.

        Raises:
            FileNotFoundError: it was collected.
            IntegrityError, ManifestError: as `torchrl_ext.versions.containers.Container.read`.
        """
        where, files, name = f"{chain.store.url}/{folder}", dict[str, memoryview](), ""
        if manifest.container in ("packed", CONTAINER):
            wanted = self._wanted if manifest.container == CONTAINER else _all
            return read_parts(self._payloads, folder, manifest, wanted)
        if manifest.container not in containers.names():
            raise ManifestError(
                f"{where} is laid out in a form unknown here: there is no container {manifest.container!r}",
                expected=f"one of {', '.join((*containers.names(), CONTAINER))}",
            )
        container: Container = containers.make(manifest.container)
        try:
            for name in manifest.files:
                files[name] = memoryview(chain.store.get(f"{folder}/{name}"))
        except FileNotFoundError as error:
            if MANIFEST not in chain.store.list(folder):  # collected in between
                raise
            raise incomplete(where, name, manifest, None) from error
        for name, size in manifest.files.items():
            self._whole_bytes += size
            if len(files[name]) != size:
                raise incomplete(where, name, manifest, len(files[name]))
        return container.read(manifest, files, where)

    @property
    def read_bytes(self) -> int:
        """Bytes of payloads that are read: when the route is opened, or later where it is `streamed`."""
        return self._payloads.nbytes + self._whole_bytes

    @property
    def streamed(self) -> bool:
        """Whether reading on needs versions to stay in the store: deltas that are many, or a keyframe in a bucket."""
        return self._payloads.streamed or (self.published is not None and not self._payloads.store.reads_removed)

    def first(self, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor as it is where the route starts, from the keyframe or the base.

        Raises:
            IntegrityError: a damaged tensor, or another base; names the tensor.
        """
        if self.published is not None:
            yield from self.published.pairs({} if self.deltas else into)
        elif self.base is not None:
            where, manifest, _ = self.deltas[0]
            own = {meta.name for meta in self.params}
            for name, tensor in self.base:
                if name in own:
                    if manifest.base_digests:  # another library's deltas name none
                        same_base({name: position_digest(tensor).hex()}, manifest, where)
                    yield name, tensor
        else:
            raise IntegrityError(f"no full version leads to version {self.reached[1]}")

    def patch(self, meta: ParamMeta, base: Tensor | None) -> Patch | None:
        """Return all changes of one tensor on the route as one patch; None where there are none.

        Args:
            meta: the tensor.
            base: the tensor where the route starts, for encodings that need it. It is left as it is.

        Raises:
            IntegrityError: a payload is damaged, or cannot be decoded without ``base``; names tensor and file.
        """
        patches, work = list[Patch](), base
        for where, manifest, decoders in self.deltas:
            if meta.name not in decoders:
                continue
            if patches and work is not None:  # each is decoded against the result of the one before
                work = work.clone() if work is base else work
                apply_patch(patches[-1], work)
            try:
                patches.append(decoders[meta.name](work))
            except IntegrityError as error:
                raise IntegrityError(
                    f"tensor {meta.name!r} in {where}/{_file(manifest, meta.name)} cannot be used: {error.what}",
                    expected=error.expected,
                    state=error.state,
                    hint=error.hint or "let the trainer publish again",
                ) from error
        return fold(patches) if len(patches) > 1 else patches[0] if patches else None

    def patches(self, copies: Mapping[str, Tensor], wanted: Callable[[str], bool]) -> Iterator[Patch]:
        """Return an iterator over the patches of tensors that change and are wanted; nothing else is decoded.

        Args:
            copies: tensors where the route starts, as far as encodings need them.
            wanted: says of a name whether its tensor is wanted.
        """
        decoding = []
        for meta in self.params:
            if meta.name in self._changed and wanted(meta.name):
                decoding.append(partial(self.patch, meta, copies.get(meta.name)))
        return decode_tensors(decoding, threads=worker_threads(beside_model=True))  # type: ignore[arg-type]

    def whole(self, copies: Mapping[str, Tensor], names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors as they are where the route ends, made from host copies of them where it starts."""
        wanted = frozenset(names)

        def at_the_end(meta: ParamMeta) -> tuple[str, Tensor]:
            return meta.name, self.applied(meta, copies[meta.name].clone())[0]

        made = (partial(at_the_end, meta) for meta in self.params if meta.name in wanted)
        yield from decode_tensors(made, threads=worker_threads(beside_model=True))

    def applied(self, meta: ParamMeta, tensor: Tensor) -> tuple[Tensor, Patch | None]:
        """Return a tensor as it is where the route ends, changed in place if it is contiguous, and what was applied."""
        patch = self.patch(meta, tensor)
        if patch is None:
            return tensor, None
        tensor = tensor if tensor.is_contiguous() else tensor.contiguous()
        apply_patch(patch, tensor)
        return tensor, patch

    def verify(self, name: str, tensor: Tensor) -> None:
        """Compare a tensor with the digest that it has where the route ends.

        Raises:
            IntegrityError: it is another one; names it and the files that made it.
        """
        expected = self.digests.get(name)
        if expected is None or (found := position_digest(tensor).hex()) == expected:
            return
        files = [f"{where}/{_file(manifest, name)}" for where, manifest, decoders in self.deltas if name in decoders]
        raise IntegrityError(
            f"tensor {name!r} does not come out as version {self.reached[1]} has it, by "
            f"{', '.join(files) or 'the keyframe'}",
            expected=f"digest {expected}, found {found}",
            state="nothing of it was used",
            hint="a delta was applied to another base; let the trainer publish a keyframe",
        )

    def keep(self, lease: ExitStack) -> None:
        """Hold a lease until the route is closed."""
        self._leases = lease

    def close(self) -> None:
        """Close the files, and give up the lease. May be called twice."""
        if self.published is not None:
            self.published.close()
        self._leases.close()


def same_base(digests: Mapping[str, str], delta: DeltaManifest, where: str) -> None:
    """Compare what a worker holds with the base of the first delta.

    Args:
        digests: position digests of what it holds, by name; of some of its tensors.
        delta: the first delta, which names those of its base.
        where: its folder, for messages.

    Raises:
        IntegrityError: it holds something else; names the first tensor.
    """
    for name, found in digests.items() if delta.base_digests else ():
        expected = delta.base_digests.get(name)
        if found != expected:
            raise IntegrityError(
                f"tensor {name!r} of the base checkpoint is not the one on which {where} was taken",
                expected=f"digest {expected}, found {found}",
                state="nothing was changed",
                hint="start from the checkpoint that the trainer names as base=",
            )


def _file(manifest: DeltaManifest, name: str) -> str:
    row = next((row for row in manifest.params if row.meta.name == name), None)
    return "" if row is None else ", ".join(dict.fromkeys(one.file for one in row.payloads))


def _all(name: str) -> None:
    """Say that all of a parameter is wanted."""
