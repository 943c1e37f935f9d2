"""`WeightReceiver` joins a trainer's transport and loads the weights that it sends into a model."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchrl_ext.base import messages
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.devices import current, current_device, free_cached
from torchrl_ext.base.errors import ConfigError, EngineRefusedError, IntegrityError, NotConnectedError, StaleBaseError
from torchrl_ext.base.messages import NOBODY, WHOLE, Message, replaced
from torchrl_ext.base.registry import transports
from torchrl_ext.base.types import Info, ParamMeta, Part
from torchrl_ext.data.landing.loader import Patchable, Rehearsable, Sliceable, WeightLoader, as_loader
from torchrl_ext.data.landing.patcher import Changes
from torchrl_ext.data.landing.sliced import Sliced
from torchrl_ext.data.stores.opening import admit
from torchrl_ext.data.transports.base import Arrival, LandingEnd, Worker
from torchrl_ext.data.transports.standalone import StandaloneTransport
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.data.weights.digests import Digests, digest_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["WeightReceiver", "WeightsState"]

_TIMEOUT_S = 60.0  # if the trainer sends no timeout
_NOTHING_TO_REHEARSE = "the model computes with the tensors that are read back: there is nothing to rehearse"
_AGAIN = "send again: the next update is sent whole"


@dataclass(frozen=True, kw_only=True)
class WeightsState:
    """The state of a model's weights.

    Attributes:
        base: the version on which a partial update may build; 0 is the weights that the engine was started with. None
            if no partial update may, because the weights are another sender's or have another origin.
        intact: the weights are one version with known digests, so the next version may arrive as changes.
        landing: the version of an incomplete or unproved update; None if all tensors have the same origin.
        empty: the weights' memory was released, and no update has filled it since.
    """

    base: int | None = None
    intact: bool = False
    landing: int | None = None
    empty: bool = False

    def __str__(self) -> str:
        if self.empty:
            return "no weights"
        if not self.intact:
            return "parts of several versions, or weights of another origin"
        return "another sender's weights" if self.base is None else f"version {self.base}"


class _WayBack(NamedTuple):
    """What a receiver held, and called the version in service, before it landed changes to ``version``."""

    version: int
    held: WeightsState
    before: int


class WeightReceiver:
    """Loads weights into a model, driven by messages in an engine or by `poll_and_apply` without one.

    Args:
        target: module, TensorDict, mapping or `WeightLoader` that receives the weights.
        transport: the worker's transport, for use without an engine; in an engine, `Join` names the transport.
        rank: this worker's rank within its engine, from 0 to the engine's world size - 1.

    Attributes:
        target: the ``target`` argument, or the model registered last.
        connection: connection id of the last `Join`.
        held: state of the model's weights.
        version: the version in service; 0 before the first.

    Example:
        >>> trainer, worker = tx.DiskTransport(root), tx.DiskTransport(root)
        >>> receiver = tx.WeightReceiver(torch.nn.Linear(4, 2), worker)
        >>> trainer.send_weights(policy)
        >>> receiver.poll_and_apply(timeout=5.0), receiver.version
        (True, 1)
    """

    def __init__(self, target: Any = None, transport: StandaloneTransport | None = None, *, rank: int = 0) -> None:
        self._loader: WeightLoader | None = None if target is None else as_loader(target)
        self.target = target
        self._alone, self._rank = transport, rank
        self._end: LandingEnd | None = None
        self._timeout_s, self._within = _TIMEOUT_S, Deadline(0)
        self.connection = self._sender = ""
        self.held = WeightsState(base=0, intact=True)
        self._staged: Changes | None = None
        self._landed: Changes | None = None  # of which the transport's end does not know, as an undo may come
        self._back: _WayBack | None = None
        self._part: Part | None = None  # set while a partial update is under way
        self._sealed = self._loading = False  # a load, past its `finish`; a load, not a commit of changes
        self._open = False  # between `start` and `finish`, unless the engine was resumed
        self._loads: list[int] = []  # versions of the loads that landed since `start`
        self._compared = ""  # digest over the digests with which the model was compared since then
        self._reads_back = False  # the trainer sends no digests, and wants to know what the model holds
        self._arrived = Digests()  # of what arrived, if so
        self._in_slices = False  # the workers of an engine get different tensors, or parts of them
        self._joined: tuple[ParamMeta, ...] = ()
        self.version = 0

    @property
    def landed(self) -> int:
        """The version that the last load since `start` brought; without one, the version in service."""
        return self._loads[-1] if self._loads else self.version

    @property
    def device(self) -> torch.device:
        """Where the model is; the default of this thread without a model."""
        return current_device() if self._loader is None else self._loader.device

    @property
    def whole(self) -> bool:
        """Whether no update is incomplete and all layers are in the form that the model computes with."""
        return self.held.landing is None and (self._loader is None or self._loader.idle)

    # driven by an engine

    def handle(self, message: Message) -> Info:
        """Handle a message, and return when it is done.

        Returns:
            The answer, JSON-safe and possibly empty.

        Raises:
            ConfigError: the receiver does not support this message.
            EngineRefusedError: another sender has joined since; see `refuse_replaced`.
            WeightSyncError: the step failed.
        """
        self.refuse_replaced(message)
        with current(self.device):  # of whichever thread the engine handles messages in
            return self._answer(message)

    def _answer(self, message: Message) -> Info:
        match message:
            case messages.Join():
                self.connect(message)
            case messages.Rehearse():
                return self.rehearse(message)
            case messages.Prefetch():
                self.prefetch(message)
                self.confirm()
            case messages.Commit():
                return self.commit(message)
            case messages.Undo():
                return self.undo(message)
            case messages.Keep():
                self.keep()
            case messages.Start():
                self.start()
            case messages.Load():
                self.load(message)
            case messages.Verify():
                self.verify(message.digests)
            case messages.Finish():
                return self.finish(message)
            case messages.Reset():
                self.invalidate(empty=message.weights == "gone")
                if message.weights == "reloaded":
                    self.held = WeightsState()
                    self._require_loader().reloaded()
            case messages.State():
                return {} if message.connection else self._state()
            case messages.Leave():
                if message.connection in ("", self.connection):
                    self.close()
            case messages.Poll():  # every message is handled before it is answered
                return {"obstacle": self.obstacle()}
            case _:
                raise ConfigError(f"a receiver does not handle messages of kind {message.kind!r}", state="unchanged")
        return {}

    def refuse_replaced(self, message: Message) -> None:
        """Refuse a message if its sender is not the one that joined last.

        Raises:
            EngineRefusedError: another sender has joined, which the message names, or none has since the start.
        """
        if not isinstance(message, messages.Connected) or isinstance(message, (messages.Join, messages.Leave)):
            return
        if message.connection in ("", self.connection):  # without an id, it counts as the last sender's
            return
        raise replaced(f"{self._sender or 'another one'} has joined" if self.connection else NOBODY)

    def check(self, message: messages.Join) -> Info:
        """Check the paths and the parameters of a join before it connects anything; return its offer, paths resolved.

        Raises:
            ManifestError: the trainer's parameters do not fit the model.
            ConfigError: the offer names a path that this engine may not open.
        """
        offer = dict(message.offer)
        for name in ("root", "base"):
            if offer.get(name) is not None:
                offer[name] = admit(offer[name])
        self._require_loader().check(message.params)
        return offer

    def connect(self, message: messages.Join) -> None:
        """Join the transport that ``message`` names.

        Raises:
            ManifestError, ConfigError: as `check`; or there is no transport of this name.
            EngineRefusedError: a rehearsal showed that updates would go wrong.
        """
        loader = self._require_loader()
        offer = self.check(message)
        loader.compare_start(self._deadline().stop)
        self.connection, self._sender = message.connection, message.sender
        kind = transports.load(message.transport)
        if isinstance(loader, Sliceable):
            loader.by_slices(kind.abilities.slices)
        if isinstance(loader, Rehearsable):
            loader.refuse_unsound(unproved=message.unproved)
            loader.vouch(message.compares and not kind.abilities.digests)
        self._reads_back, self._in_slices = message.compares and kind.abilities.digests, kind.abilities.slices
        self.close()
        self._timeout_s = message.timeout_s
        here = Worker(
            rank=message.rank_offset + self._rank,
            params=message.params,
            slices=loader.slices() if isinstance(loader, Sliceable) else {},
            whole=loader.whole() if isinstance(loader, Sliceable) else {},
            copies=lambda name: not (isinstance(loader, Patchable) and loader.patchable(name)),
        )
        self._end = kind.join(offer, here, self._deadline())
        if self.held.base:  # that number belongs to the previous sender or connection
            self.held = replace(self.held, base=None)
        self._staged, self._joined, self._loads, self._open = None, message.params, [], False
        self._landed = None
        self.keep()
        self._expect(None)

    def rehearse(self, message: messages.Rehearse) -> Info:
        """Check that an update leads to the same state as a cold start (`torchrl_ext.engines.rehearsal`).

        Returns:
            ``needed`` (for an ``ask``: whether a rehearsal would run), ``proof`` (`WeightLoader.proof`), ``shared``
            (`WeightLoader.shared`) and the rehearsal's findings.

        Raises:
            EngineRefusedError, IntegrityError: an update leads to another state.
        """
        loader = self._require_loader()
        if not isinstance(loader, Rehearsable):
            return {"needed": False, "proof": loader.proof(), "why": _NOTHING_TO_REHEARSE, "shared": loader.shared}
        needed = message.how != "never" and loader.unrehearsed()
        if needed and not message.ask:
            with self._comparing(landing=self.version):  # IntegrityError: it could not restore the weights
                loader.rehearse()
            needed = False
        return {"needed": needed, "proof": loader.proof(), "shared": loader.shared, **loader.rehearsal()}

    def prefetch(self, message: messages.Prefetch) -> None:
        """Fetch, check, decode and stage a version as far as possible while the engine serves.

        After an error the engine keeps serving its weights.

        Raises:
            StaleBaseError: the model does not hold the version that the part builds on, or the engine loaded other
                weights meanwhile.
            ManifestError: some tensors of the part can be loaded only together with others.
            WeightSyncError: the version could not be fetched or staged.
        """
        version, part, before = message.version, message.part, self.held
        end, loader, self._staged = self._require_end(), self._require_loader(), None
        self.keep()
        loader.compare_start(self._deadline().stop)
        if part is not None and before.base != part.base:
            raise StaleBaseError(
                f"the update sends some of a model's tensors and takes the others from version {part.base}, but this "
                f"worker holds {before}",
                expected=f"version {part.base}, whole, from this trainer",
                state="nothing was changed; the engine still serves its previous weights",
                hint=_AGAIN,
            )
        self._expect(part)
        held = loader.digests if before.intact and isinstance(loader, Patchable) else None
        changes = end.stage(version, held, self._deadline())
        if changes is not None:
            with self._comparing():
                self._require_patchable().stage(changes)
        self._staged = changes  # before the look at `held`: `invalidate` changes that before it drops what is staged
        if before.intact and not self.held.intact:  # the engine's thread changed it meanwhile
            self._staged = None
            self._expect(None)
            raise StaleBaseError(
                f"the engine loaded other weights while version {version} was staged",
                expected="the weights on which its changes build",
                state=f"version {version} was not loaded; the engine serves the other weights",
                hint=_AGAIN,
            )

    def _expect(self, part: Part | None) -> None:
        """Note which part comes next, also in the loader; None means all tensors."""
        self._part = None
        self._require_loader().part(None if part is None else part.names)
        self._part = part

    def confirm(self) -> None:
        """Check the staged changes together with the engine's other workers; call it in the thread that generates.

        Raises:
            IntegrityError: the workers together would not hold the trainer's weights.
        """
        if self._staged is not None:
            with self._comparing():
                self._require_patchable().confirm()

    def obstacle(self) -> str:
        """Return why the version that was prefetched needs an idle engine; "" if `commit` may write it."""
        if self._staged is None:
            return WHOLE
        return self._require_patchable().obstacle() if self.whole else "the engine holds a part of another version"

    def commit(self, message: messages.Commit) -> Info:
        """Write the staged version between two steps of the engine, and read it back.

        Returns:
            As `finish`.

        Raises:
            EngineRefusedError: the version is not staged, or there is an `obstacle`; nothing was changed.
            IntegrityError: the model holds something else than was written; `undo` may take it back.
        """
        version, staged = message.version, self._staged
        if staged is not None and staged.reached[1] == version:
            if obstacle := self.obstacle():
                raise EngineRefusedError(f"version {version} needs a pause: {obstacle}", state="nothing was changed")
            self._staged = None
            self._land(staged)
            self.held, self.version = WeightsState(base=version, intact=True), version
            self._compared = digest_of(staged.digests)
            self._expect(None)
        elif self.held.base != version:  # else it was committed, and the answer lost
            raise EngineRefusedError(f"version {version} is not staged", state="nothing was changed", hint=_AGAIN)
        return {"version": version, "digest": self._compared}

    def _land(self, staged: Changes) -> None:
        self.keep()
        leads_back = not self._require_patchable().obstacle()
        self._back = _WayBack(staged.reached[1], self.held, self.version) if leads_back else None
        self._spoil(landing=staged.reached[1])
        self._require_patchable().commit()
        self._landed = staged

    def undo(self, message: messages.Undo) -> Info:
        """Hold again what was held before a version landed as changes; drop it if it was only staged.

        Returns:
            ``version``, which the model holds now.

        Raises:
            EngineRefusedError: the version came whole, or was kept, so that nobody knows what it replaced.
            NotConnectedError, IntegrityError: the model's memory was replaced, or differs from what was written.
        """
        back, self._staged = self._back, None
        if back is not None and back.version == message.version:
            self._back = self._landed = None
            self._spoil(landing=message.version)
            self._require_patchable().undo()
            self.held, self.version = back.held, back.before
            self._open, self._loads = False, []
        elif not self.whole or message.version in (self.version, *self._loads):
            raise EngineRefusedError(
                f"there is no way back from version {message.version}",
                expected="a version that came as changes, and was not kept",
                hint=_AGAIN,
            )
        self._expect(None)
        return {"version": self.version}

    def keep(self) -> None:
        """Give up the way back from the version that landed last; the transport's end follows it."""
        landed, self._landed, self._back = self._landed, None, None
        if isinstance(self._loader, Patchable):
            self._loader.keep()
        if landed is not None and self._end is not None:
            self._end.landed(landed)

    def start(self) -> None:
        """Begin a version in the idle engine; no weight or layer changes before the first load.

        Raises:
            EngineRefusedError, StaleBaseError: a load cannot begin (`WeightLoader.ready`).
        """
        self._require_end()
        self._open = self._sealed = self._loading = False
        self._loads, self._compared, self._arrived = [], "", Digests()
        self._require_loader().ready()
        self._open = True

    def give_up(self) -> None:
        """Note that the engine goes on without the version that was started; nothing more of it may be loaded."""
        self._open = False

    def _require_open(self) -> None:
        if not self._open:
            raise NotConnectedError(
                "no weight update is open: none was started, or the engine was resumed or slept since",
                expected="a Start message, while the engine is paused",
                state="nothing was changed",
                hint="call update_weights again; if it fails so again, something else resumes the engine meanwhile",
            )

    def _begin(self) -> None:
        self.keep()
        self._spoil()
        self._require_loader().start()
        self._loading = True

    def load(self, message: messages.Load) -> None:
        """Load one handoff, or commit the staged changes if they are for its version.

        Raises:
            IntegrityError: the handoff is not for the part that `prefetch` announced.
            WeightSyncError: receiving or loading failed.
        """
        loader, end = self._require_loader(), self._require_end()
        self._require_open()
        staged, self._staged = self._staged, None
        loads, self._loads, self._compared = self._loads, [], ""  # forgotten if it fails
        if staged is not None and staged.reached[1] == message.version:
            self._land(staged)
            self._loads, self._compared = [*loads, message.version], digest_of(staged.digests)
            return
        if message.onto != (None if self._part is None else self._part.base):
            raise IntegrityError(
                f"version {message.version} comes as {'all' if self._part else 'some'} tensors of a model, unlike "
                "its announcement",
                expected="the tensors that the prefetch announced",
                hint=_AGAIN,
            )
        if not self._loading:
            self._begin()
        self._spoil(landing=message.version)  # before receiving, because a transport may write into the model's memory
        arrival = Arrival(version=message.version, params=self.params_of(message), info=message.handoff)
        with closing(_passed_on(end.receive(arrival, loader.targets(), self._deadline()))) as pairs:
            loader.load(self._noted(pairs) if self._reads_back else pairs)
        self._loads = [*loads, message.version]

    def params_of(self, message: messages.Load) -> tuple[ParamMeta, ...]:
        """Return the parameters of a handoff: its own, or those of the join that the next part sends."""
        if message.params is not None:
            return message.params
        return tuple(meta for meta in self._joined if self._part is None or meta.name in self._part.names)

    def verify(self, expected: Mapping[str, str]) -> None:
        """End the load, because until then some layers may hold older weights, and check the model's digests.

        Args:
            expected: the trainer's digests by name, to compare with `WeightLoader.digests`.

        Raises:
            IntegrityError: a parameter differs from what the trainer sent; the message names the first one.
        """
        self._require_open()
        self.seal()
        loads, self._loads = self._loads, []  # forgotten if they differ
        self._compare(expected, self._read_back())
        self._loads, self._compared = loads, digest_of(expected)

    def _compare(self, expected: Mapping[str, str], found: Mapping[str, str]) -> None:
        for name, digest in expected.items():
            if found.get(name) != digest:
                raise IntegrityError(
                    f"parameter {name!r} of the model differs from what the trainer sent",
                    expected=f"digest {digest}, found {found.get(name)}",
                    state="the engine holds a damaged update and stays paused",
                    hint="send the version again",
                )

    def _read_back(self) -> dict[str, str]:
        """Return the digests of what the model holds; of what cannot be read back, those of what was handed over."""
        held, arrived = self._require_loader().digests(), self._arrived.hex()
        return {name: one or arrived.get(name, "") for name, one in held.items()}

    def _noted(self, pairs: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the same pairs, and note what the tensors are; slices have been compared where they lie."""
        for name, tensor in pairs:
            if not isinstance(tensor, Sliced):
                self._arrived.add(name, tensor)
            yield name, tensor
        self._arrived.launch()

    def seal(self) -> None:
        """End the load, so that `finish` does no work that can fail."""
        if not self._sealed:
            loads, self._loads = self._loads, []  # forgotten if it fails
            self._require_loader().finish()
            if arrived := self._arrived.hex():
                self._compare(arrived, self._read_back())
                self._compared = "" if self._in_slices else digest_of(arrived)
            self._loads, self._sealed = loads, True

    def due(self, message: messages.Finish) -> None:
        """Refuse a `finish` that does not fit what landed; end the load if `seal` did not.

        Raises:
            EngineRefusedError: fewer loads of the version landed than it had, or none, or one of another version.
        """
        version, landed = message.version, self._loads.count(message.version)
        if landed < max(1, message.loads) or landed < len(self._loads):
            others = sorted({*self._loads} - {version})
            raise EngineRefusedError(
                f"version {version} was finished, and this worker got {landed} of its {message.loads} load(s)"
                + (f", and others of version {', '.join(map(str, others))}" if others else ""),
                expected="every load of a version, and then its end",
                state=f"it holds {'its previous weights' if self.held.landing is None else 'a part of an update'}",
                hint=_AGAIN,
            )
        self.seal()

    def finish(self, message: messages.Finish) -> Info:
        """Note that the model holds all of a version, as it was `due`; free the memory that a load took.

        Returns:
            ``version``, which it holds now; and ``digest``, `torchrl_ext.data.weights.digests.digest_of` the digests
            with which all of its tensors were compared since `start`, or "" if they were not, or if the transport
            brings slices, which differ between workers.
        """
        self.due(message)
        if self._loading:  # what loading took is wanted by others: a trainer on this device, a KV cache that wakes up
            free_cached()
            self._loading = False
        self._open, self.version = False, message.version
        self.held, self._sealed = WeightsState(base=self.version, intact=True), False
        self._arrived = Digests()  # a client that hears one of its servers at a time asks the others again
        self._expect(None)
        return {"version": self.version, "digest": self._compared}

    def invalidate(self, *, empty: bool = False, torn: bool = False) -> None:
        """Note that the model no longer holds what this receiver loaded, so the next version does not build on it.

        Args:
            empty: the model has no weights until an update fills it.
            torn: the engine is loading a checkpoint itself, which is incomplete until a `Reset`.
        """
        landing = self.version if torn else self.held.landing
        self.held = WeightsState(landing=landing, empty=empty)  # first, as a version may be staged in another thread
        self._staged, self._loads, self._landed, self._back = None, [], None, None
        self._expect(None)
        self._require_loader().invalidate()

    def abort(self) -> None:
        """End a wait that is in progress in another thread."""
        self._within.stop.set()

    def close(self) -> None:
        """Leave the transport. Calling it twice is allowed."""
        end, self._end = self._end, None
        if end is not None:
            end.close()
        if self._alone is not None:
            self._alone.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # for use without an engine, with TorchRL's method names

    def register_model(self, model: Any) -> None:
        """Set the model that receives weights; if it replaces another one, the trainer has to join again."""
        loader, first = as_loader(model), self._loader is None
        if self._end is not None:
            self.close()
        self.target, self._loader = model, loader
        self._staged = self._part = self._landed = self._back = None
        self.held = WeightsState(base=0 if first else None, intact=first)

    def init_all_workers_group(self, model_metadata: Mapping[str, tuple[torch.dtype, Any]], **_: Any) -> None:
        """Connect the worker end of a collective transport; other transports need no group."""
        self._require_alone().init_all_workers_group(model_metadata)

    def poll_and_apply(self, timeout: float | None = 0.0) -> bool:
        """Apply the newest version if one arrives within ``timeout`` seconds; return whether one did."""
        received = self._require_alone().receive_weights(timeout, model=self._loader)
        if received is not None:
            self.version = self._require_alone().received_version
        return received is not None

    def apply_weights(self, weights: Any) -> None:
        """Load ``weights`` (TensorDict or mapping) directly.

        Raises:
            ManifestError: they do not fit the model.
        """
        source, loader = as_source(weights), self._require_loader()
        loader.check(source.params())
        self.invalidate(empty=self.held.empty, torn=True)
        loader.start()
        loader.load(source)
        loader.finish()
        self.held = WeightsState()

    def _state(self) -> Info:
        known: Info = {"whole": self.whole, "connection": self.connection, "sender": self._sender}
        if not self.whole:
            known["landing"] = self.held.landing or self.version
        return known | ({"empty": True} if self.held.empty else {})

    def _spoil(self, landing: int | None = None) -> None:
        """Note that the model's tensors now have several origins; ``landing`` is the version of some of them."""
        self.held = WeightsState(landing=self.held.landing if landing is None else landing, empty=self.held.empty)

    @contextmanager
    def _comparing(self, landing: int | None = None) -> Iterator[None]:
        """If the block raises IntegrityError, note that no version may build on the weights."""
        try:
            yield
        except IntegrityError:
            self._staged = None
            self._spoil(landing)
            raise

    def _deadline(self) -> Deadline:
        self._within = Deadline(self._timeout_s, "the trainer")
        return self._within

    def _require_loader(self) -> WeightLoader:
        if self._loader is None:
            raise NotConnectedError("this receiver has no model", hint="call register_model(model)")
        return self._loader

    def _require_patchable(self) -> Patchable:
        loader = self._require_loader()
        if not isinstance(loader, Patchable):
            raise ConfigError(
                f"a {type(loader).__name__} takes whole tensors only, not changes",
                hint="use another transport than delta",
            )
        return loader

    def _require_end(self) -> LandingEnd:
        if self._end is None:
            raise NotConnectedError("this receiver has not joined a transport", hint="connect first")
        return self._end

    def _require_alone(self) -> StandaloneTransport:
        if self._alone is None:
            raise NotConnectedError("this receiver has no transport", hint="pass a transport to WeightReceiver")
        return self._alone


def _passed_on(pairs: Iterator[tuple[str, Tensor]]) -> Generator[tuple[str, Tensor], None, None]:
    """Yield the same pairs; closing this drops the transport's iterator, which a traceback could keep open."""
    yield from pairs
