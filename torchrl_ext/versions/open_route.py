"""A route through a chain, with everything on it open: nothing that is collected later is missed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Protocol

from torch import Tensor

from torchrl_ext.codecs.patch import Patch, apply_patch, fold
from torchrl_ext.errors import IntegrityError, ManifestError
from torchrl_ext.stores.chain import Chain
from torchrl_ext.stores.delta_manifest import DeltaManifest
from torchrl_ext.stores.manifest import MANIFEST, Manifest
from torchrl_ext.stores.routes import Held, Route
from torchrl_ext.types import ParamMeta
from torchrl_ext.versions.delta_files import Decode, container_of
from torchrl_ext.weights.digests import position_digest
from torchrl_ext.weights.source import WeightSource

__all__ = ["FullVersion", "OpenFull", "OpenRoute", "open_route", "patched", "same_params", "verified", "wrong_base"]

_ATTEMPTS = 20


class FullVersion(Protocol):
    """A keyframe, open for reading."""

    def params(self) -> tuple[ParamMeta, ...]:
        """What it holds, in order."""

    def pairs(self, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in order, each verified before it is yielded, and filled into ``into`` where it can be."""

    def close(self) -> None:
        """Let go of it. May be called twice."""


OpenFull = Callable[[int, Manifest], FullVersion]


class OpenRoute:
    """What a reader has to read, read as far as that keeps it safe from collection.

    Attributes:
        digests: position digest of every tensor at the end, by name; none where a keyframe is the end.

    Args:
        held: where it starts; None at a keyframe.
        reached: where it leads.
        params: every parameter there.
        published: the keyframe, its files open.
        base: what stands in for a keyframe where the route begins at version 0; with the digests it has to have.
        manifests: of the deltas, each with its folder for messages.
        steps: the deltas' decoders by name; their files were fetched.
    """

    def __init__(
        self,
        held: Held | None,
        reached: Held,
        params: tuple[ParamMeta, ...],
        published: FullVersion | None,
        manifests: tuple[tuple[str, DeltaManifest], ...],
        steps: tuple[Mapping[str, Decode], ...],
        base: WeightSource | None = None,
    ) -> None:
        self.held, self.reached, self.params, self.published = held, reached, params, published
        self.manifests, self._steps, self.base = manifests, steps, base
        rows = manifests[-1][1].params if manifests else ()
        self.digests = {row.meta.name: row.digest for row in rows if row.digest}

    def first(self, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor where the route begins: of the keyframe, or of the base.

        Raises:
            IntegrityError: a damaged tensor, or another base; names the tensor.
        """
        if self.published is not None:
            yield from self.published.pairs({} if self.manifests else into)
        elif self.base is not None:
            own, expected = {meta.name for meta in self.params}, self.manifests[0][1].base_digests
            for name, tensor in self.base:
                if name in own:
                    if expected:
                        _same_base(name, position_digest(tensor).hex(), expected, self.manifests[0][0])
                    yield name, tensor
        else:
            raise IntegrityError(f"no full version leads to version {self.reached[1]}")

    def where(self, name: str) -> str:
        """The files on the route that change a tensor, for messages."""
        rows = [(where, row) for where, manifest in self.manifests for row in manifest.params if row.meta.name == name]
        return ", ".join(f"{where}/{row.file}" for where, row in rows if row.changed) or "the keyframe"

    def changes(self, name: str) -> bool:
        """Whether a tensor changes on the route; nothing is decoded for that."""
        return any(name in step for step in self._steps)

    def patch(self, meta: ParamMeta, base: Tensor | None) -> Patch | None:
        """All changes of one tensor as one. With a base, each link is decoded against the result of the one before."""
        links = [step[meta.name] for step in self._steps if meta.name in step]
        if not links:
            return None
        if base is None or len(links) == 1:
            return fold([decode(base) for decode in links])
        work, patches = base.clone(), []
        for decode in links:
            patches.append(decode(work))
            apply_patch(patches[-1], work)
        return fold(patches)

    def close(self) -> None:
        """Close the files. May be called twice."""
        if self.published is not None:
            self.published.close()

    def __enter__(self) -> OpenRoute:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_route(
    chain: Chain, open_full: OpenFull, target: int, held: Held | None, base: WeightSource | None = None
) -> OpenRoute:
    """Open the shortest route to ``target``; another one when a version on it is collected meanwhile.

    Args:
        chain: the versions.
        open_full: opens a keyframe.
        target: where to.
        held: where from; None to begin at a keyframe, or at ``base``.
        base: what version 0 is.

    Raises:
        FileNotFoundError: ``target`` is not there (any more).
        IntegrityError: no route leads there, or something on it is damaged; names the file.
    """
    for last in range(_ATTEMPTS - 1, -1, -1):
        try:
            origin = chain.origin(target) if base is not None and held is None else None
            route = chain.route(target, held if origin is None else (origin.base_run_id, 0))
        except IntegrityError as error:
            if last and chain.latest() > target:  # collection overtook us between two manifests
                raise FileNotFoundError(f"version {target} in {chain.store.url}") from error
            raise
        try:
            with chain.lease(route):
                return _opened(chain, open_full, route, target, held, base)
        except FileNotFoundError:
            chain.forget()
            if not last:
                raise
    raise AssertionError("unreachable")


def _opened(
    chain: Chain, open_full: OpenFull, route: Route, target: int, held: Held | None, base: WeightSource | None
) -> OpenRoute:
    published = None if route.keyframe is None else open_full(route.keyframe.version, route.keyframe)
    try:
        manifests = tuple((f"{chain.store.url}/{folder}", manifest) for folder, manifest in route.deltas)
        steps = tuple(_step(chain, folder, manifest) for folder, manifest in route.deltas)
        return OpenRoute(
            held if published is None else None,
            (chain.run_id(target), target),
            chain.params(target),
            published,
            manifests,
            steps,
            base if published is None and held is None else None,
        )
    except BaseException:
        if published is not None:
            published.close()
        raise


def _step(chain: Chain, folder: str, manifest: DeltaManifest) -> Mapping[str, Decode]:
    where = f"{chain.store.url}/{folder}"

    def get(name: str) -> bytes:
        try:
            return chain.store.get(f"{folder}/{name}")
        except FileNotFoundError as error:
            if MANIFEST not in chain.store.list(folder):  # collected in between
                raise
            row = next((row for row in manifest.params if row.changed and row.file == name), None)
            raise IntegrityError(
                f"{where}/{name} is missing" + (f", which holds tensor {row.meta.name!r}" if row else ""),
                expected="every file that the manifest names",
                state=f"nothing of version {manifest.version} was used",
                hint="let the trainer publish again",
            ) from error

    return container_of(manifest, where).read(manifest, get, where)


def _same_base(name: str, found: str, expected: Mapping[str, str], where: str) -> None:
    if expected and found != expected.get(name):
        raise IntegrityError(
            f"tensor {name!r} of the base checkpoint is not the one on which {where} was taken",
            expected=f"digest {expected.get(name)}, found {found}",
            state="nothing was changed",
            hint="start from the checkpoint that the trainer names as base=",
        )


def wrong_base(digests: Mapping[str, str], origin: DeltaManifest, where: str) -> None:
    """Hold what a worker has against the base of the first delta.

    Args:
        digests: position digests of what it has, by name; of some tensors at least.
        origin: the first delta.
        where: its folder, for messages.

    Raises:
        IntegrityError: it has something else; names the first tensor.
    """
    for param in origin.params:
        if param.meta.name in digests:
            _same_base(param.meta.name, digests[param.meta.name], origin.base_digests, where)


def patched(tensor: Tensor, patch: Patch) -> Tensor:
    """``tensor``, changed in place where it is contiguous."""
    tensor = tensor if tensor.is_contiguous() else tensor.contiguous()
    apply_patch(patch, tensor)
    return tensor


def verified(route: OpenRoute, name: str, tensor: Tensor) -> None:
    """Hold a tensor against its digest.

    Raises:
        IntegrityError: it is another one; names it and the files that made it.
    """
    expected = route.digests.get(name)
    if expected is None:
        return
    found = position_digest(tensor).hex()
    if found != expected:
        raise IntegrityError(
            f"tensor {name!r} does not come out as version {route.reached[1]} has it, by {route.where(name)}",
            expected=f"digest {expected}, found {found}",
            state="nothing of it was used",
            hint="a delta was applied to another base; let the trainer publish a keyframe",
        )


def same_params(held: tuple[ParamMeta, ...], delta: DeltaManifest, where: str) -> None:
    """Whether a delta is one of the model that is held, in whatever order.

    Raises:
        ManifestError: names the first parameter that differs, and the delta's folder.
    """
    own = {meta.name: meta for meta in held}
    for param in delta.params:
        if own.get(param.meta.name) != param.meta:
            raise ManifestError(
                f"{where} changes {param.meta}",
                expected=str(own.get(param.meta.name, "a tensor of the model that is held")),
                state="nothing was read",
                hint="the delta belongs to another model",
            )
    if len(delta.params) != len(own):
        lost = min(own.keys() - {param.meta.name for param in delta.params})
        raise ManifestError(f"{where} does not know tensor {lost!r}", state="nothing was read")
