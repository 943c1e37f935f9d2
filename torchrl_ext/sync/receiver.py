"""`WeightReceiver` joins the transport that the trainer names, and lands the weights that it sends."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchrl_ext import messages
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError, IntegrityError, NotConnectedError, StaleBaseError
from torchrl_ext.landing.loader import Changes, WeightLoader, as_loader
from torchrl_ext.messages import NOBODY, Message, replaced
from torchrl_ext.registry import transports
from torchrl_ext.stores.opening import admit
from torchrl_ext.transports.base import Arrival, Worker, WorkerEnd
from torchrl_ext.transports.standalone import StandaloneTransport
from torchrl_ext.types import Info, ParamMeta, Part, decoded
from torchrl_ext.weights.devices import free_cached
from torchrl_ext.weights.source import as_source

__all__ = ["Held", "WeightReceiver"]

_TIMEOUT_S = 60.0  # of a transport whose trainer names no deadline
_AGAIN = "send again: the next update is sent whole"


@dataclass(frozen=True, kw_only=True)
class Held:
    """The weights that a model holds.

    Attributes:
        base: the version on which a part may build: 0 for the weights that the engine was started with; None where no
            part may, since they are another sender's, or of another origin.
        intact: they are one version, of which the digests are known: the next version may come as changes.
        landing: the version of which a part landed, and the rest did not come, or was not proved; None where every
            tensor is of one origin.
        empty: their memory was given up, and no update has filled it since.
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


class WeightReceiver:
    """Lands weights in one model. Inside an engine the control layer drives it; alone, `poll_and_apply` does.

    Args:
        target: module, TensorDict, mapping or `WeightLoader` that takes the weights.
        transport: a worker's transport, to use without a control layer; an engine joins the one that `Join` names.
        rank: this worker's rank within its engine, 0 .. world size of the engine - 1.

    Attributes:
        target: as it was given.
        connection: the one that `Join` named last.
        held: the weights that the model holds.
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
        self._end: WorkerEnd | None = None
        self._timeout_s, self._within = _TIMEOUT_S, Deadline(0)
        self.connection = self._sender = ""
        self.held = Held(base=0, intact=True)
        self._staged: Changes | None = None
        self._part: Part | None = None  # of the version that comes, where it brings only some tensors
        self._sealed = False
        self._rows: tuple[list[Any], tuple[ParamMeta, ...]] = [], ()
        self.version = 0

    @property
    def whole(self) -> bool:
        """Whether the model holds one version that arrived whole, and layers in the form that is computed with."""
        return self.held.landing is None and (self._loader is None or self._loader.idle)

    # driven by an engine

    def handle(self, message: Message) -> Info:
        """Do what a message says, and return when it is done.

        Returns:
            The answer, JSON-safe; empty where there is nothing to say.

        Raises:
            ConfigError: a receiver does not know such a message.
            EngineRefusedError: another sender has joined since; see `refuse_replaced`.
            WeightSyncError: the step failed.
        """
        self.refuse_replaced(message)
        match message:
            case messages.Join():
                self.connect(message)
            case messages.Rehearse():
                return self.rehearse(message)
            case messages.Prefetch():
                self.prefetch(message)
                self.confirm()
            case messages.Start():
                self.start()
            case messages.Load():
                self.load(message)
            case messages.Verify():
                self.verify(message.digests)
            case messages.Seal():
                self.seal()
            case messages.Finish():
                self.finish(message.version)
            case messages.Reset():
                self.invalidate(empty=message.weights == "gone")
                if message.weights == "reloaded":
                    self.held = Held()
                    self._require_loader().reloaded()
            case messages.State():
                return {} if message.connection else self._state()
            case messages.Leave():
                if message.connection in ("", self.connection):
                    self.close()
            case messages.Poll():  # whatever was begun was done when it was answered
                pass
            case _:
                raise ConfigError(f"a message of kind {message.kind!r} means nothing here", state="unchanged")
        return {}

    def refuse_replaced(self, message: Message) -> None:
        """Refuse a step of a sender in whose place another one has joined, or none since a start; nothing is touched.

        Raises:
            EngineRefusedError: names the sender that has joined since.
        """
        if not isinstance(message, messages.Connected) or isinstance(message, (messages.Join, messages.Leave)):
            return
        if message.connection in ("", self.connection):  # one that bears none is of whoever had the worker join
            return
        raise replaced(f"{self._sender or 'another one'} has joined" if self.connection else NOBODY)

    def check(self, message: messages.Join) -> None:
        """Refuse what can be known to fail before a transport is joined, or a weight touched.

        Raises:
            ManifestError: the trainer's parameters cannot land here.
            ConfigError: the offer names what this engine may not open.
        """
        for name in ("root", "base", "local_dir"):
            if message.offer.get(name) is not None:
                admit(message.offer[name], made=name == "local_dir")
        self._require_loader().check(message.params)

    def connect(self, message: messages.Join) -> None:
        """Join the transport that ``message`` names.

        Raises:
            ManifestError: the trainer's parameters cannot land here; nothing was joined.
            ConfigError: no transport has this name, or the message names what this engine may not open.
        """
        loader = self._require_loader()
        self.check(message)
        self.connection, self._sender = message.connection, message.sender
        kind = transports.load(message.transport)
        loader.by_slices(kind.slices)
        loader.refuse_unsound(unproved=message.unproved)
        loader.vouch(message.compares)
        self.close()
        timeout_s = message.offer.get("timeout_s", _TIMEOUT_S)
        self._timeout_s = decoded(timeout_s, float, "timeout_s of the offer")
        here = Worker(
            rank=message.rank_offset + self._rank,
            params=message.params,
            slices=loader.slices(),
            whole=loader.whole(),
            copies=lambda name: not loader.patchable(name),
        )
        self._end = kind.join(message.offer, here, self._deadline())
        if self.held.base:  # of a version of another sender, or of this one before
            self.held = replace(self.held, base=None)
        self._staged = None
        self._expect(None)

    def rehearse(self, message: messages.Rehearse) -> Info:
        """Show that an update's route leads to the same state as a cold start (`torchrl_ext.proof.rehearsal`).

        Returns:
            ``needed`` (to an ``ask``: it would be done), ``proof`` (`WeightLoader.proof`) and what it showed.

        Raises:
            EngineRefusedError, IntegrityError: the route does not lead there.
        """
        loader = self._require_loader()
        needed = message.how != "never" and loader.unrehearsed(again=message.how == "always")
        if needed and not message.ask:
            with self._comparing(landing=self.version):  # it raises where it could not put the weights back
                loader.rehearse()
            needed = False
        return {"needed": needed, "proof": loader.proof(), **loader.rehearsal()}

    def prefetch(self, message: messages.Prefetch) -> None:
        """Fetch, check, decode and stage a version, as far as that can be done while the engine serves.

        Raises:
            StaleBaseError: the model does not hold the version that the part builds on, or the engine loaded other
                weights meanwhile.
            ManifestError: some tensors of the part land only together with others.
            WeightSyncError: the version cannot be had. In all cases the engine goes on with what it serves.
        """
        version, part, before = message.version, message.part, self.held
        end, loader, self._staged = self._require_end(), self._require_loader(), None
        if part is not None and before.base != part.base:
            raise StaleBaseError(
                f"some tensors of a model were sent to stay beside those of version {part.base}, and this one holds "
                f"{before}",
                expected=f"version {part.base}, whole, from this trainer",
                state="nothing was changed; the engine serves what it served",
                hint=_AGAIN,
            )
        self._expect(part)
        held = loader.position_digests if before.intact else None
        label = message.label if before.intact else None  # weights that the engine loaded by itself have labels too
        changes = end.stage(version, held, self._deadline(), files=message.files, label=label)
        if changes is not None:
            with self._comparing():
                loader.stage(changes)
        if before.intact and not self.held.intact:  # in another thread: the engine serves while this goes on
            self._expect(None)
            raise StaleBaseError(
                f"the engine loaded other weights while version {version} was staged",
                expected="the weights that its changes begin with",
                state=f"version {version} did not land, and the engine goes on with what it loaded",
                hint=_AGAIN,
            )
        self._staged = changes

    def _expect(self, part: Part | None) -> None:
        """Take note of what comes next, also in the loader; with None, everything."""
        self._part = None
        self._require_loader().part(None if part is None else part.names)
        self._part = part

    def confirm(self) -> None:
        """Check what was staged together with the engine's other workers; called in the thread that generates.

        Raises:
            IntegrityError: together they would not hold what the trainer has.
        """
        if self._staged is not None:
            with self._comparing():
                self._require_loader().confirm()

    def start(self) -> None:
        """Make ready to load; the engine is idle, and what torch keeps of the device's memory is there for the load."""
        self._require_end()
        self._sealed = False
        if self._staged is None:
            self._begin()

    def _begin(self) -> None:
        self._spoil()
        free_cached()
        self._require_loader().start()

    def load(self, message: messages.Load) -> None:
        """Land one handoff, or the staged changes where they are of its version."""
        loader, end = self._require_loader(), self._require_end()
        staged, self._staged = self._staged, None
        if staged is not None and staged.reached[1] == message.version:
            self._spoil(landing=message.version)
            loader.commit()
            end.landed(staged)
            return
        if message.handoff.get("onto") != (None if self._part is None else self._part.base):
            raise IntegrityError(
                f"version {message.version} comes as {'all' if self._part else 'some'} tensors of a model, which was "
                "not announced",
                expected="what the prefetch before it said",
                hint=_AGAIN,
            )
        if self.held.intact:  # what was staged is another version
            self._begin()
        self._spoil(landing=message.version)  # a transport may fill the model's own memory
        arrival = Arrival(version=message.version, params=self._params(message.handoff), info=message.handoff)
        with closing(_passed_on(end.receive(arrival, loader.targets(), self._deadline()))) as pairs:
            loader.load(pairs)

    def _params(self, handoff: Info) -> tuple[ParamMeta, ...]:
        """Return the parameters of a handoff; most are those of the handoff before."""
        rows = handoff.get("params", [])
        if rows != self._rows[0]:
            self._rows = rows, tuple(map(ParamMeta.from_json, rows))
        return self._rows[1]

    def verify(self, expected: Mapping[str, str]) -> None:
        """End the load, and compare ``expected`` with the digests that the loader vouches for (`WeightLoader.digests`).

        The load is ended first, since until then some layers may hold older weights.

        Raises:
            IntegrityError: names the first parameter that is not what the trainer sent.
        """
        self.seal()
        found = self._require_loader().digests()
        for name, digest in expected.items():
            if found.get(name) != digest:
                raise IntegrityError(
                    f"parameter {name!r} of the model is not what the trainer sent",
                    expected=f"digest {digest}, found {found.get(name)}",
                    state="the engine holds a damaged update and stays paused",
                    hint="send the version again",
                )

    def seal(self) -> None:
        """End the load, so that nothing is left for `finish` that could fail, and give back what it took meanwhile."""
        if not self._sealed:
            self._require_loader().finish()
            free_cached()
            self._sealed = True

    def finish(self, version: int) -> None:
        """Note that the model holds ``version``, of which everything arrived; end the load if `seal` did not."""
        self.seal()
        landed = version if self.held.landing is None else self.held.landing
        self.held, self._sealed, self.version = Held(base=landed, intact=True), False, version
        self._expect(None)

    def invalidate(self, *, empty: bool = False, torn: bool = False) -> None:
        """Note that the model holds something else than what landed here: the next version does not build on it.

        Args:
            empty: it holds nothing, until an update fills it.
            torn: the engine loads a checkpoint by itself, which is not whole before a `Reset` says so.
        """
        landing = self.version if torn else self.held.landing
        self.held = Held(landing=landing, empty=empty)  # first, as a version may be staged in another thread
        self._staged = None
        self._expect(None)
        self._require_loader().invalidate()

    def abort(self) -> None:
        """End a wait in another thread."""
        self._within.stop.set()

    def close(self) -> None:
        """Leave the transport. May be called twice."""
        end, self._end = self._end, None
        if end is not None:
            end.close()
        if self._alone is not None:
            self._alone.shutdown()

    # used alone: methods with TorchRL's names

    def register_model(self, model: Any) -> None:
        """Set where weights land; in place of another model, a trainer that joined for that one has to join again."""
        loader, first = as_loader(model), self._loader is None
        if self._end is not None:
            self.close()
        self.target, self._loader = model, loader
        self._staged = self._part = None
        self.held = Held(base=0 if first else None, intact=first)

    def init_all_workers_group(self, model_metadata: Mapping[str, tuple[torch.dtype, Any]], **_: Any) -> None:
        """Connect the worker end of a collective transport; other transports need no group."""
        self._require_alone().init_all_workers_group(model_metadata)

    def poll_and_apply(self, timeout: float | None = 0.0) -> bool:
        """Apply the newest version if one came within ``timeout`` seconds; return whether one did."""
        received = self._require_alone().receive_weights(timeout, model=self._loader)
        if received is not None:
            self.version = self._require_alone().received_version
        return received is not None

    def apply_weights(self, weights: Any) -> None:
        """Land ``weights`` (TensorDict or mapping) directly."""
        source, loader = as_source(weights), self._require_loader()
        loader.check(source.params())
        self.invalidate(empty=self.held.empty, torn=True)
        loader.start()
        loader.load(source)
        loader.finish()
        self.held = Held()

    def _state(self) -> Info:
        torn = {"whole": True} if self.whole else {"whole": False, "landing": self.held.landing or self.version}
        return {"empty": True, **torn} if self.held.empty else torn

    def _spoil(self, landing: int | None = None) -> None:
        """Note that the model's tensors are of several origins from here on; with ``landing``, some are of that."""
        self.held = Held(landing=self.held.landing if landing is None else landing, empty=self.held.empty)

    @contextmanager
    def _comparing(self, landing: int | None = None) -> Iterator[None]:
        """Let nothing build on the weights, where an IntegrityError in the block shows that they are not as thought."""
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

    def _require_end(self) -> WorkerEnd:
        if self._end is None:
            raise NotConnectedError("this receiver joined no transport", hint="connect first")
        return self._end

    def _require_alone(self) -> StandaloneTransport:
        if self._alone is None:
            raise NotConnectedError("this receiver has no transport of its own", hint="give WeightReceiver one")
        return self._alone


def _passed_on(pairs: Iterator[tuple[str, Tensor]]) -> Generator[tuple[str, Tensor], None, None]:
    """Yield the same pairs; closing this drops the transport's iterator, which an error's traceback could keep open."""
    yield from pairs
