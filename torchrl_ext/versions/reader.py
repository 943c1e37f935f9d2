"""The reading side of a chain: from what a worker holds to a version, by the fewest bytes, every element once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial

from torch import Tensor

from torchrl_ext.codecs.patch import Patch, apply_patch
from torchrl_ext.codecs.pipeline import decode_tensors, spare_threads
from torchrl_ext.errors import ConfigError, IntegrityError, ManifestError
from torchrl_ext.landing.changes import Changes
from torchrl_ext.stores.chain import Chain
from torchrl_ext.stores.routes import Held
from torchrl_ext.types import ParamMeta
from torchrl_ext.versions.host_copies import HostCopies
from torchrl_ext.versions.open_route import OpenFull, OpenRoute, open_route, patched, same_params, verified, wrong_base
from torchrl_ext.weights.checkpoint import CheckpointSource

__all__ = ["ChainReader"]

log = logging.getLogger("torchrl_ext")


class ChainReader:
    """One worker's place in a chain.

    Args:
        chain: the versions.
        open_full: opens a full version for reading.
        base: checkpoint directory that is version 0, if there is one.
        copies: makes the host copies.

    Attributes:
        held: what this worker holds; None before the first version, or when in doubt.
        mirror: host copies of tensors that the worker needs whole (see `retain`), at version ``held``. They follow what
            landed when the next version is looked for, so that nobody waits for them in a pause.
    """

    def __init__(
        self, chain: Chain, open_full: OpenFull, base: str | None = None, copies: HostCopies | None = None
    ) -> None:
        self.chain, self._open_full, self._base = chain, open_full, base
        self._copies = copies or HostCopies()
        self.held: Held | None = None
        self.mirror: dict[str, Tensor] = {}
        self._params: tuple[ParamMeta, ...] = ()
        self._landed: Changes | None = None
        self._retained: Callable[[str], bool] = lambda name: False

    def retain(self, which: Callable[[str], bool]) -> None:
        """Keep host copies of the tensors for which ``which`` says so, from the next full version on."""
        self._retained = which
        self.mirror, self.held, self._landed = {}, None, None

    def adopt(self, target: int, digests: Callable[[], Mapping[str, str]]) -> None:
        """Find out which version of the chain the worker holds: one whose digests are all those of ``digests``.

        Args:
            target: the version that it is to get to.
            digests: recomputes position digests of what it holds.

        Raises:
            IntegrityError: only the base would do, and the worker holds something else; names the tensor.
        """
        with suppress(FileNotFoundError):
            deltas = list(self.chain.back(target))
            if not deltas:
                return
            origin = deltas[-1][1] if deltas[-1][1].base_version == 0 else None
            params = self.chain.params(target)
            mirrored = {meta.name for meta in params if self._retained(meta.name)}
            if mirrored and (origin is None or self._base is None):
                return  # there are no copies to begin with
            try:
                own = {**digests()}
            except ConfigError:  # the model cannot be read back
                return
            if not own or any(meta.name not in own and meta.name not in mirrored for meta in params):
                return
            for _, delta in deltas if not mirrored else ():
                base = None
                with suppress(FileNotFoundError, IntegrityError):  # then it is not the one that the worker holds
                    base = self.chain.version(delta.base_version)[1] if delta.base_version else None
                if base is not None and all(own.get(row.meta.name) == row.digest for row in base[1].params):
                    self.held, self._params = (base[1].run_id, base[1].version), params
                    return
            if origin is not None and self._base is not None:
                wrong_base(own, origin, f"{self.chain.store.url}/{deltas[-1][0]}")
                source = CheckpointSource(self._base) if mirrored else ()
                self.mirror = {name: self._copies.copy(tensor) for name, tensor in source if name in mirrored}
                self.held, self._params = (origin.base_run_id, 0), params

    def open(self, target: int) -> OpenRoute:
        """The route that `tensors` would take to ``target``, open for reading.

        Raises:
            FileNotFoundError: ``target`` is not there (any more).
            IntegrityError: no route leads there, or something on it is damaged; names the file.
        """
        self._catch_up()
        follows = self.held is not None and bool(self._params) and all(m.name in self.mirror for m in self._params)
        if follows and self._leads(target):
            return open_route(self.chain, self._open_full, target, self.held)
        base = None if self._base is None else CheckpointSource(self._base)
        return open_route(self.chain, self._open_full, target, None, base)

    def _leads(self, target: int) -> bool:
        """False, and nothing is held, where what is held was replaced under its number and only the base leads on.

        Raises:
            IntegrityError: neither leads to ``target``.
        """
        try:
            self.chain.route(target, self.held)
        except IntegrityError:
            origin = None if self._base is None else self.chain.origin(target)
            if origin is None:
                raise
            self.chain.route(target, (origin.base_run_id, 0))
            self.held, self.mirror = None, {}
            return False
        return True

    def changes(self, target: int) -> Changes | None:
        """What leads from the version held to ``target``; None where only a full version leads there."""
        self._catch_up()
        if self.held is None or not self._leads(target):
            return None
        route = open_route(self.chain, self._open_full, target, self.held)
        if route.published is not None:
            route.close()
            return None
        for where, manifest in route.manifests:
            same_params(self._params, manifest, where)

        def patches(wanted: Callable[[str], bool]) -> Iterator[Patch]:
            metas = (meta for meta in route.params if route.changes(meta.name) and wanted(meta.name))
            decodes = (partial(route.patch, meta, self.mirror.get(meta.name)) for meta in metas)
            yield from (patch for patch in decode_tensors(decodes, threads=spare_threads()) if patch is not None)

        def at_the_end(meta: ParamMeta) -> tuple[str, Tensor]:
            tensor = self.mirror[meta.name].clone()
            patch = route.patch(meta, tensor)
            return meta.name, tensor if patch is None else patched(tensor, patch)

        def whole(names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
            wanted = frozenset(names)
            made = (partial(at_the_end, meta) for meta in route.params if meta.name in wanted)
            yield from decode_tensors(made, threads=spare_threads())

        return Changes(
            held=self.held,
            reached=route.reached,
            params=route.params,
            patches=patches,
            digests=route.digests,
            whole=whole,
        )

    def check(self, route: OpenRoute) -> None:
        """Read everything on a route that begins at a keyframe or the base, and keep none of it.

        Raises:
            IntegrityError: something is damaged; names tensor and file.
        """
        if route.published is None and route.base is None:  # it begins at the host copies, and is checked as it is read
            return
        for _ in self._from_start(route, {}):
            pass

    def tensors(self, route: OpenRoute, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor at the end of a route that `open` opened, each verified before it is yielded; closes the route.

        Args:
            route: how to get there.
            into: tensors that may be filled directly.
        """
        with route:
            if route.published is None and route.base is None:
                yield from self._from_mirror(route)
                return
            self.held, mirror = None, {}
            for name, tensor in self._from_start(route, into):
                if self._retained(name):
                    mirror[name] = self._copies.copy(tensor)
                yield name, tensor
            self.mirror = mirror
            self.held, self._params = route.reached, route.params

    def advance(self, changes: Changes) -> None:
        """The worker holds what ``changes`` lead to; mirrored tensors follow before the next version is read.

        Raises:
            IntegrityError: ``changes`` do not begin at what is held; the next version is read in full.
        """
        self._catch_up()
        if self.held != changes.held:
            held, self.held = self.held, None
            raise IntegrityError(f"version {changes.held[1]} is not the one held", expected=str(held))
        self._landed = changes
        if not self.mirror:
            self._catch_up()

    def _catch_up(self) -> None:
        """Bring the mirror to what landed last. Where that fails nothing is held, and the next version read in full.

        The mirror lives and dies with this process, and ``held`` names no version while it is between two: whatever
        interrupts this is seen by whoever comes next.
        """
        changes, self._landed = self._landed, None
        if changes is None:
            return
        self.held = None
        try:
            for patch in changes.patches(self.mirror.__contains__) if self.mirror else ():
                apply_patch(patch, self.mirror[patch.meta.name])
        except IntegrityError as error:
            log.warning(
                "host copies could not follow to version %d, the next is read whole: %s", changes.reached[1], error
            )
            return
        self.held = changes.reached

    def _from_start(self, route: OpenRoute, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        first = route.params if route.published is None else route.published.params()
        for where, manifest in route.manifests:
            same_params(first, manifest, where)
        seen = set()
        for name, tensor in route.first(into):
            patch = route.patch(ParamMeta.of(name, tensor), tensor)
            if patch is not None:
                tensor = patched(tensor, patch)
            verified(route, name, tensor)
            seen.add(name)
            yield name, tensor
        lost = next((meta.name for meta in route.params if meta.name not in seen), None)
        if lost is not None:
            raise ManifestError(f"the base checkpoint has no tensor {lost!r}, which version {route.reached[1]} has")

    def _from_mirror(self, route: OpenRoute) -> Iterator[tuple[str, Tensor]]:
        """The mirror takes the patches when everything was verified, so that a damaged version leaves it as it was."""
        if route.held != self.held:
            raise IntegrityError(f"the route begins at {route.held}", expected=str(self.held))
        for where, manifest in route.manifests:
            same_params(self._params, manifest, where)
        landing: list[Patch] = []
        for meta in route.params:
            tensor = self.mirror[meta.name].clone()
            patch = route.patch(meta, tensor)
            if patch is not None:
                tensor = patched(tensor, patch)
                verified(route, meta.name, tensor)
                landing.append(patch)
            yield meta.name, tensor
        self.held = None
        for patch in landing:
            apply_patch(patch, self.mirror[patch.meta.name])
        self.held = route.reached
