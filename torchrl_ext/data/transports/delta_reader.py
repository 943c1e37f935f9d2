"""`DeltaReader` follows a chain of versions: the worker's end of a delta transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TypeVar, final

from torch import Tensor

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import IntegrityError, StoreError
from torchrl_ext.base.types import Info, Wire
from torchrl_ext.data.deltas.codec import codec_from_json
from torchrl_ext.data.landing.changes import Changes
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.folders import version_name
from torchrl_ext.data.stores.opening import open_store
from torchrl_ext.data.stores.store import MemoryStore, Store
from torchrl_ext.data.transports.base import Arrival, LandingEnd, Worker
from torchrl_ext.data.transports.broadcast import Broadcast
from torchrl_ext.data.transports.collective import CollectiveWorker, VLLMCollectiveTransport
from torchrl_ext.data.transports.shared_root import VISIBLE_S, Invitation
from torchrl_ext.data.transports.standalone import Mailbox
from torchrl_ext.data.versions.compiled import compile_loops
from torchrl_ext.data.versions.open_route import OpenRoute
from torchrl_ext.data.versions.reader import ChainReader
from torchrl_ext.data.weights.blocks import Block

__all__ = ["DeltaOffer", "DeltaReader"]

_SHORTEST_S, _LONGEST_S = 0.005, 0.1  # between two looks at a version
_Taken = TypeVar("_Taken")


class DeltaOffer(Wire, frozen=True, kw_only=True):
    """Where versions come from: a root (`Invitation`), or a group in which they are broadcast.

    Attributes:
        needs_base: deltas are decoded with all old bytes, of which workers keep a copy then.
        codec: the encoding; None where it is not known, of a root that a caller names.
        base: the checkpoint on which the first version is a delta.
        group: the offer of the collective transport that broadcasts them.
    """

    needs_base: bool = False
    codec: Info | None = None
    base: str | None = None
    group: Info | None = None
    root: str | None = None
    probe: str = ""
    run_id: str = ""
    trainer: str = ""


@final
class DeltaReader(LandingEnd, Mailbox):
    """Follows a chain; a version that was staged, or that `get` returned, stays open, so that none can prune it.

    Args:
        store: holds the versions; in memory where a group brings them.
        base: the checkpoint that the worker holds already.
        group: brings the versions.
        copies: names the tensors of which whole copies are kept.
        slices: the blocks that are read of changes, by name.
    """

    def __init__(
        self,
        store: Store,
        base: str | None,
        *,
        group: CollectiveWorker | None = None,
        copies: Callable[[str], bool] = lambda name: False,
        slices: Mapping[str, tuple[Block, ...]] | None = None,
    ) -> None:
        self._store = store
        self._chain = Chain(store)
        self._broadcast = None if group is None else Broadcast(group, store, self._chain)
        self._reader = ChainReader(self._chain, base, None if self._broadcast is None else self._broadcast.full.open)
        self._reader.want(slices or {})
        self._reader.retain(copies)
        self._opened: OpenRoute | None = None

    @classmethod
    def joined(cls, offer: DeltaOffer, here: Worker, within: Deadline) -> DeltaReader:
        """Return the end of worker ``here``, connected to the trainer that made the offer.

        Raises:
            StoreError: its root cannot be seen from here.
        """
        group = None
        if offer.group is None:
            root = offer.root or ""
            store = open_store(root)
            invitation = Invitation(root=root, probe=offer.probe, run_id=offer.run_id, trainer=offer.trainer)
            invitation.find(store, within)
        else:
            store = MemoryStore()
            group = VLLMCollectiveTransport.join(offer.group, here, within)
        made = cls(
            store,
            offer.base,
            group=group,
            copies=lambda name: offer.needs_base or here.copies(name),
            slices=here.slices,
        )
        if offer.codec is not None:
            compile_loops(codec_from_json(offer.codec), here.params)
        return made

    def stage(self, version: int, held: Callable[[], Mapping[str, str]] | None, within: Deadline) -> Changes | None:
        return self._reach(version, partial(self._changes, version, held), within)

    def _changes(self, version: int, held: Callable[[], Mapping[str, str]] | None) -> Changes | None:
        """Return the changes that lead to a version; None where it has to be read in full, which is open then."""
        if held is not None:
            if self._reader.held is None:
                self._reader.adopt(version, held)
            changes = self._reader.changes(version)
            if changes is not None:
                return changes
        self._pin(self._reader.open(version))
        return None

    def landed(self, staged: Changes) -> None:
        self._reader.advance(staged)
        self._forget()

    def receive(self, arrival: Arrival, into: Mapping[str, Tensor], within: Deadline) -> Iterator[tuple[str, Tensor]]:
        route, self._opened = self._opened, None
        if route is None or route.reached[1] != arrival.version:
            route = self._reach(arrival.version, partial(self._reader.open, arrival.version), within)
        try:
            yield from self._reader.tensors(route, into)
        except (FileNotFoundError, IntegrityError) as error:
            if self._chain.latest() == arrival.version:
                raise
            raise FileNotFoundError(f"version {arrival.version} was removed while it was read") from error
        self._forget()

    def get(self, within: Deadline, received: Arrival | None = None) -> Arrival | None:
        before = 0 if received is None else received.version
        for _ in self._looks(within):
            version = self._reader.unseen(before)
            if version:
                with suppress(FileNotFoundError):  # pruned meanwhile: a newer one is coming
                    self._chain.known.clear()
                    self._pin(route := self._reader.open(version))
                    return Arrival(version=version, params=route.params)
        return None

    def _reach(self, version: int, take: Callable[[], _Taken], within: Deadline) -> _Taken:
        """Return what ``take`` finds of a version, once that is here.

        A shared filesystem may show a version late, and a broadcast takes a while.

        Raises:
            StoreError, DeadlineError, TransportError: the version did not come.
        """
        missing: FileNotFoundError | None = None
        within = within.within(VISIBLE_S) if self._broadcast is None else within.again()
        self._chain.known.clear()
        for _ in self._looks(within):
            try:
                self._chain.version(version)
                return take()
            except FileNotFoundError as error:
                missing = error
        if self._broadcast is not None:
            what = f"weights version {version} did not come from the trainer"
            hint = "check that the trainer runs, and send again"
            raise within.error(what, state="nothing was changed", hint=hint) from missing
        raise StoreError(
            f"{self._store.url} holds no version {version}, and none came within {within.timeout_s:g} s",
            expected=f"{version_name(version)}; the newest here is {self._chain.latest()}",
            state="nothing was read",
            hint="send the weights again",
        ) from missing

    def _looks(self, within: Deadline) -> Iterator[None]:
        """Yield whenever the store may have another version, until the deadline."""
        if self._broadcast is None:
            for _ in within.pauses(shortest_s=_SHORTEST_S, longest_s=_LONGEST_S):
                yield
            return
        yield
        while self._broadcast.fetch(within):
            yield

    def _pin(self, route: OpenRoute | None) -> None:
        if self._opened is not None:
            self._opened.close()
        self._opened = route

    def _forget(self) -> None:
        if self._broadcast is not None:
            self._broadcast.landed()

    def close(self) -> None:
        self._pin(None)
        if self._broadcast is not None:
            self._broadcast.close()
