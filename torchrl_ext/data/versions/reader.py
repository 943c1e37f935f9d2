"""The reading side of a chain: from what a worker holds to a version, by the fewest bytes, every element once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from torchrl_ext.base.errors import ConfigError, IntegrityError, ManifestError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.deltas.table import units
from torchrl_ext.data.landing.patcher import Changes
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.manifest import RunVersion
from torchrl_ext.data.versions.full import PublishedVersion
from torchrl_ext.data.versions.open_route import OpenBase, OpenFull, OpenRoute, Wanted
from torchrl_ext.data.weights.blocks import Block
from torchrl_ext.data.weights.checkpoint import CheckpointSource

__all__ = ["ChainReader"]

log = logging.getLogger("torchrl_ext")

_ATTEMPTS = 20


class ChainReader:
    """Follows a chain for one worker, from the version that it holds to newer ones.

    Args:
        chain: the versions.
        base: checkpoint directory that is version 0, if there is one.
        open_full: opens a full version for reading; by default from its files in the store.
        copies: says of which tensors the worker needs host copies, by name.
        slices: the blocks of changed tensors that are read, by name; names that are left out are read whole.

    Attributes:
        held: what this worker holds; None before the first version, or where that is not known.
        mirror: host copies, at version ``held``. They follow what landed when the next version is looked for, so that
            nobody waits for them in a pause.
        read_bytes: bytes of deltas that were read for the last route; keyframes do not count.
    """

    def __init__(
        self,
        chain: Chain,
        base: str | None = None,
        open_full: OpenFull | None = None,
        *,
        copies: Callable[[str], bool] = lambda name: False,
        slices: Mapping[str, tuple[Block, ...]] = MappingProxyType({}),
    ) -> None:
        self.chain, self._open_full = chain, open_full or partial(PublishedVersion, chain.store)
        self._base: OpenBase | None = None if base is None else partial(CheckpointSource, base)
        self._retained, self._slices = copies, slices
        self.held: RunVersion | None = None
        self.mirror: dict[str, Tensor] = {}
        self._params: dict[str, ParamMeta] = {}
        self._landed: Changes | None = None
        self.read_bytes = 0

    def adopt(self, target: int, digests: Callable[[], Mapping[str, str]]) -> None:
        """Find out whether the worker holds the base, if deltas lead from that to a version.

        Args:
            target: the version.
            digests: recomputes the digests of what the worker holds.

        Raises:
            FileNotFoundError, IntegrityError: as `Chain.route`.
        """
        route = None if self._base is None else self.chain.route(target, based=True)
        if route is None or route.start is None:
            return
        params, known = self.chain.version(target).params, route.deltas[0][1].hex_base_digests
        mirrored = {meta.name for meta in params if self._retained(meta.name)}
        with suppress(ConfigError):  # the model cannot be read back
            own = digests()
            same = all(known.get(name, found) == found for name, found in own.items())
            if same and own and {meta.name for meta in params} <= own.keys() | mirrored:
                if mirrored and self._base is not None:
                    self.mirror = {name: _copied(tensor) for name, tensor in self._base() if name in mirrored}
                self.held, self._params = route.start, _by_name(params)

    def open(self, target: int) -> OpenRoute:
        """Open the route to ``target``, for `tensors` to read.

        Raises:
            FileNotFoundError: ``target`` is not there (any more).
            IntegrityError: no route leads there, or something on it is damaged; names the file.
            ManifestError: a delta on it belongs to another model.
        """
        self._catch_up()
        if self.held is not None and self._params and self._params.keys() <= self.mirror.keys():
            return self._open(target, self.held)
        return self._open(target, None)

    def changes(self, target: int) -> Changes | None:
        """Return the changes from the version held to ``target``; None where only a full version leads there."""
        self._catch_up()
        if self.held is None:
            return None
        route = self._open(target, self.held, self._blocks)
        if route.held is None:
            route.close()
            return None
        return self._changes(route, self.held)

    def _changes(self, route: OpenRoute, held: RunVersion) -> Changes:
        return Changes(
            held=held,
            reached=route.reached,
            params=route.params,
            patches=partial(route.patches, self.mirror),
            digests=route.digests,
            whole=partial(route.whole, self.mirror),
        )

    def _blocks(self, name: str) -> tuple[Block, ...] | None:
        """Return which blocks of a changed tensor the worker needs; None where it needs all."""
        return None if self._retained(name) else self._slices.get(name)

    def _open(self, target: int, held: RunVersion | None, wanted: Wanted | None = None) -> OpenRoute:
        """Open the shortest route to ``target``; another one when a version on it is collected meanwhile."""
        for last in range(_ATTEMPTS - 1, -1, -1):
            try:
                route = self.chain.route(target, held, based=self._base is not None)
            except IntegrityError as error:
                if last and held is None and self.chain.latest() > target:  # collection overtook us, between manifests
                    raise FileNotFoundError(f"version {target} in {self.chain.store.url}") from error
                raise
            try:
                opened = OpenRoute(self.chain, route, target, self._open_full, held, self._base, wanted)
                self.read_bytes = opened.read_bytes
                break
            except FileNotFoundError:
                self.chain.known.clear()
                if not last:
                    raise
        if held is not None and opened.base is not None:  # what is held was replaced under its number
            self.held, self.mirror = None, {}
        own = self._params
        if opened.held is None:
            own = _by_name(opened.params if opened.published is None else opened.published.params())
        known = tuple(own.values())
        for delta in opened.deltas:
            if delta.manifest.params == known:
                continue
            opened.close()
            theirs = _by_name(delta.manifest.params)
            name = next((name for name in own | theirs if own.get(name) != theirs.get(name)), "")
            raise ManifestError(
                f"{delta.where} is of a model with {theirs.get(name, f'no {name}')}",
                expected=str(own.get(name, f"no {name}")),
                state="nothing was read",
                hint="the delta belongs to another model",
            )
        return opened

    def tensors(self, route: OpenRoute, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor at the end of a route that `open` opened, each verified first; then close the route.

        Args:
            route: what `open` returned.
            into: tensors that may be filled directly.
        """
        with closing(route):
            if route.held is not None:
                if route.held != self.held:
                    raise IntegrityError(f"the route begins at {route.held}", expected=str(self.held))
                for name, tensor in route.whole(self.mirror, [meta.name for meta in route.params]):
                    route.verify(name, tensor)
                    yield name, tensor
                self.advance(self._changes(route, route.held))
                return
            self.held, mirror = None, {}
            for name, tensor in self._from_start(route, into):
                if self._retained(name):
                    mirror[name] = _copied(tensor)
                yield name, tensor
            self.mirror = mirror
            self.held, self._params = route.reached, _by_name(route.params)

    def advance(self, changes: Changes) -> None:
        """Note that the worker holds what ``changes`` lead to; host copies follow before the next version is read.

        Raises:
            IntegrityError: ``changes`` do not begin at what is held; the next version is read in full.
        """
        if self.held != changes.held:
            held, self.held = self.held, None
            raise IntegrityError(f"version {changes.held[1]} is not the one held", expected=str(held))
        if self.mirror:
            self._landed = changes
        else:
            self.held = changes.reached

    def _catch_up(self) -> None:
        """Bring the mirror to what landed last. Where that fails nothing is held, and the next version read in full.

        The mirror lasts as long as this process, and ``held`` is None while it is between two versions: so the next
        call sees that this one was interrupted.
        """
        changes, self._landed = self._landed, None
        if changes is None:
            return
        self.held = None
        try:
            for patch in changes.patches(self.mirror.__contains__):
                for own in patch.split():
                    if own.meta.name in self.mirror:
                        own.apply(units(self.mirror[own.meta.name]))
        except IntegrityError as error:
            log.warning("host copies could not be updated, so the next version is read whole: %s", error)
        else:
            self.held = changes.reached

    def _from_start(self, route: OpenRoute, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        seen = set()
        for name, tensor in route.at_end(route.first(into)):
            route.verify(name, tensor)
            seen.add(name)
            yield name, tensor
        lost = next((meta.name for meta in route.params if meta.name not in seen), None)
        if lost is not None:
            raise ManifestError(f"the base checkpoint has no tensor {lost!r}, which version {route.reached[1]} has")


def _copied(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)  # patches are written into its memory


def _by_name(params: tuple[ParamMeta, ...]) -> dict[str, ParamMeta]:
    return {meta.name: meta for meta in params}
