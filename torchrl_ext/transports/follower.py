"""The reading side of a chain: from what a worker holds to a version, by the fewest bytes, each element written once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from torchrl_ext.codecs.patch import Patch, apply_patch, fold
from torchrl_ext.errors import IntegrityError, ManifestError
from torchrl_ext.stores.chain import Chain, Held, Route
from torchrl_ext.stores.deltas import DeltaManifest
from torchrl_ext.transports.base import Changes
from torchrl_ext.transports.containers import containers
from torchrl_ext.transports.published import PublishedVersion
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.position_digest import position_digest

__all__ = ["Follower"]

Decode = Callable[[Tensor | None], Patch]


class Follower:
    """One worker's place in a chain.

    Args:
        chain: the versions.
        open_full: opens a full version for reading.

    Attributes:
        held: what this worker holds; None before the first version, or when in doubt.
        mirror: host copies of tensors that the worker needs whole (see `retain`), at version ``held``.
    """

    def __init__(self, chain: Chain, open_full: Callable[[int], PublishedVersion]) -> None:
        self.chain, self._open_full = chain, open_full
        self.held: Held | None = None
        self.mirror: dict[str, Tensor] = {}
        self._retained: Callable[[str], bool] = lambda name: False

    def retain(self, which: Callable[[str], bool]) -> None:
        """Keep host copies of the tensors for which ``which`` says so, from the next full version on."""
        self._retained = which
        self.mirror, self.held = {}, None

    def seed(self, held: Held, tensors: Mapping[str, Tensor]) -> None:
        """Start from weights that the worker has already; those to be mirrored are copied."""
        self.mirror = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items() if self._retained(name)}
        self.held = held

    def changes(self, target: int) -> Changes | None:
        """What leads from the version held to ``target``; None where only a full version leads there."""
        route = self.chain.route(target, self.held)
        if route.keyframe is not None or self.held is None:
            return None
        with self.chain.lease(route):
            steps = _opened(self.chain, route)
        params = self.chain.params(target)

        def patches() -> Iterator[Patch]:
            for meta in params:
                patch = _folded(meta, steps, self.mirror.get(meta.name))
                if patch is not None:
                    yield patch

        def whole(names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
            wanted = frozenset(names)
            for meta in params:
                if meta.name in wanted:
                    tensor = self.mirror[meta.name].clone()
                    patch = _folded(meta, steps, tensor)
                    yield meta.name, tensor if patch is None else _patched(tensor, patch)

        return Changes(
            held=self.held,
            reached=(self.chain.run_id(target), target),
            params=params,
            patches=patches,
            digests=_digests(route),
            whole=whole,
        )

    def tensors(self, target: int, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """As `full`, from the mirror where it has every tensor and the chain leads on from it."""
        changes = self.changes(target) if self.mirror else None
        if changes is None or not all(meta.name in self.mirror for meta in changes.params):
            yield from self.full(target, into)
            return
        touched = frozenset(patch.meta.name for patch in self._advance(changes))
        for meta in changes.params:
            tensor = self.mirror[meta.name]
            if meta.name in touched:
                _verify(meta.name, tensor, changes.digests[meta.name], target)
        self.held = changes.reached
        for meta in changes.params:
            yield meta.name, self.mirror[meta.name].clone()

    def full(self, target: int, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor at ``target``, from a keyframe and the deltas after it; verified before it is yielded."""
        route = self.chain.route(target)
        keyframe = route.keyframe
        if keyframe is None:  # without a version held, every route starts at one
            raise IntegrityError(f"no full version leads to version {target}")
        self.held, mirror = None, {}
        with self.chain.lease(route):
            published = self._open_full(keyframe.version)
            try:
                steps = _opened(self.chain, route)
                expected = _digests(route)
                if route.deltas:
                    _same_params(published, route.deltas[-1][1])
                for name, tensor in published.pairs({} if steps else into):
                    patch = _folded(ParamMeta.of(name, tensor), steps, tensor)
                    if patch is not None:
                        tensor = _patched(tensor, patch)
                    if name in expected:
                        _verify(name, tensor, expected[name], target)
                    if self._retained(name):
                        mirror[name] = tensor.clone()
                    yield name, tensor
            finally:
                published.close()
        self.mirror = mirror
        self.held = (self.chain.run_id(target), target)

    def advance(self, changes: Changes) -> None:
        """The worker holds what ``changes`` lead to; mirrored tensors follow.

        Raises:
            IntegrityError: a mirrored tensor is not what it should be; the next version is read in full.
        """
        for _ in self._advance(changes):
            pass
        self.held = changes.reached

    def _advance(self, changes: Changes) -> Iterator[Patch]:
        """Patch the mirror; what it holds is in doubt until the caller says otherwise."""
        held, self.held = self.held, None
        if held != changes.held:
            raise IntegrityError(f"version {changes.held[1]} is not the one held", expected=str(held))
        for patch in changes.patches() if self.mirror else ():
            tensor = self.mirror.get(patch.meta.name)
            if tensor is not None:
                apply_patch(patch, tensor)
                yield patch


def _digests(route: Route) -> dict[str, str]:
    return {param.meta.name: param.digest for param in route.deltas[-1][1].params} if route.deltas else {}


def _opened(chain: Chain, route: Route) -> list[Mapping[str, Decode]]:
    """Each delta of a route as decoders by name; every file is read and checked for its size here."""
    steps = []
    for folder, manifest in route.deltas:
        container = containers.make(manifest.container)
        steps.append(container.read(manifest, lambda name, folder=folder: chain.store.get(f"{folder}/{name}")))
    return steps


def _folded(meta: ParamMeta, steps: Sequence[Mapping[str, Decode]], base: Tensor | None) -> Patch | None:
    """All changes of one tensor as one patch. With a base, each link is decoded against the result of the one before."""
    links = [step[meta.name] for step in steps if meta.name in step]
    if not links:
        return None
    if base is None or len(links) == 1:
        return fold([decode(base) for decode in links])
    work, patches = base.clone(), []
    for decode in links:
        patches.append(decode(work))
        apply_patch(patches[-1], work)
    return fold(patches)


def _patched(tensor: Tensor, patch: Patch) -> Tensor:
    tensor = tensor if tensor.is_contiguous() else tensor.contiguous()
    apply_patch(patch, tensor)
    return tensor


def _verify(name: str, tensor: Tensor, expected: str, version: int) -> None:
    found = position_digest(tensor).hex()
    if found != expected:
        raise IntegrityError(
            f"tensor {name!r} does not come out as version {version} has it",
            expected=f"digest {expected}, found {found}",
            state="nothing of it was used",
            hint="a delta was applied to another base; let the trainer publish a keyframe",
        )


def _same_params(published: PublishedVersion, delta: DeltaManifest) -> None:
    for found, param in zip(published.params(), delta.params, strict=False):
        if found != param.meta:
            raise ManifestError(f"the keyframe holds {found}, and a delta on it {param.meta}", state="nothing was read")
    if len(published.params()) != len(delta.params):
        raise ManifestError("a keyframe and a delta on it hold different numbers of parameters")
