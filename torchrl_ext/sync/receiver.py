"""`WeightReceiver` joins the transport that the trainer names, and lands the weights that it sends."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, cast

import torch
from torch import Tensor

from torchrl_ext.errors import ConfigError, EngineRefusedError, IntegrityError, NotConnectedError
from torchrl_ext.landing.loader import Changes, WeightLoader, as_loader
from torchrl_ext.messages import (
    REPLACED,
    Connected,
    Finish,
    Inspect,
    Join,
    Leave,
    Load,
    Message,
    Poll,
    Prefetch,
    Rehearse,
    Reset,
    Seal,
    Start,
    State,
    Verify,
)
from torchrl_ext.registry import transports
from torchrl_ext.stores.opening import admit
from torchrl_ext.sync.inspection import inspect
from torchrl_ext.transports.base import Transport
from torchrl_ext.transports.standalone import StandaloneTransport
from torchrl_ext.types import Info, Part
from torchrl_ext.weights.devices import free_cached

__all__ = ["WeightReceiver"]


class WeightReceiver:
    """Lands weights in one model. Inside an engine the control layer drives it; alone, `poll_and_apply` does.

    Args:
        target: module, TensorDict, mapping or `WeightLoader` that takes the weights.
        transport: the worker end to use alone; an engine gets its transport from `connect`.
        rank: this worker's rank within its engine, 0 .. world size of the engine - 1.

    Example:
        >>> trainer, worker = tx.DiskTransport(root), tx.DiskTransport(root)
        >>> receiver = tx.WeightReceiver(torch.nn.Linear(4, 2), worker)
        >>> trainer.send_weights(policy)
        >>> receiver.poll_and_apply(timeout=5.0), receiver.version
        (True, 1)
    """

    def __init__(self, target: Any = None, transport: StandaloneTransport | None = None, *, rank: int = 0) -> None:
        self._loader: WeightLoader | None = None if target is None else as_loader(target)
        self._target = target
        self._transport: Transport | None = transport
        self._rank = rank
        self._joined = self._sealed = False
        self._sender = ""
        self.connection = ""  # the one that `Join` named last
        self.torn = False  # a part of a version landed, and the rest did not come, or was not proved
        self._intact = True  # the model holds one version, and not parts of several
        self._staged: Changes | None = None
        self._announced = False  # the version prefetched last came with names of files, or a label
        self._part: Part | None = None  # what the version that comes brings, where that is not everything
        self._followed = False  # a version landed since the trainer joined
        self._landed = 0  # the version of the last load; engines need not say which one they put in service
        self._origins = 0  # how often the model came to hold what landed elsewhere
        self.empty = False  # the weights were given up, and no update has filled them since
        self.version = 0

    @property
    def target(self) -> Any:
        """The target that takes the weights, as it was given."""
        return self._target

    @property
    def whole(self) -> bool:
        """Whether the model holds one version that arrived whole, and layers in the form that is computed with."""
        return not self.torn and (self._loader is None or self._loader.idle)

    @property
    def takes_parts(self) -> bool:
        """Whether the target takes updates of some tensors alone."""
        return self._require_loader().parts

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
            case Join():
                self.connect(message)
            case Rehearse():
                return self.rehearse(message)
            case Prefetch():
                self.prefetch(message.version, message.part, files=message.files, label=message.label)
                self.confirm()
            case Start():
                self.start()
            case Load():
                self.load(message)
            case Verify():
                self.verify(message.digests)
            case Seal():
                self.seal()
            case Finish():
                self.finish(message.version)
            case Reset():
                self.invalidate(empty=message.weights == "gone")
                if message.weights == "reloaded":
                    self.reloaded()
            case State():
                return {} if message.connection else self.state()
            case Inspect():
                return inspect(message)
            case Leave():
                if message.connection in ("", self.connection):
                    self.close()
            case Poll():  # whatever was begun was done when it was answered
                pass
            case _:
                raise ConfigError(f"a message of kind {message.kind!r} means nothing here", state="unchanged")
        return {}

    def refuse_replaced(self, message: Message) -> None:
        """Refuse a step of a sender in whose place another one has joined, or none since a start; nothing is touched.

        Raises:
            EngineRefusedError: names the sender that has joined since.
        """
        if not isinstance(message, Connected) or isinstance(message, (Join, Leave)):
            return
        if message.connection in ("", self.connection):  # one that bears none is of whoever had the worker join
            return
        since = f"{self._sender or 'another one'} has joined" if self._joined else "no sender has joined"
        raise EngineRefusedError(
            f"{REPLACED}: {since} this engine since",
            expected="steps of the sender that joined last",
            state="nothing was touched",
            hint="one sender at a time: the next update of this one joins again, and replaces the other",
        )

    def state(self) -> Info:
        """Return the answer to a `State` that asks how the weights are."""
        torn = {"whole": True} if self.whole else {"whole": False, "landing": self._landed}
        return {"empty": True, **torn} if self.empty else torn

    def check(self, message: Join) -> None:
        """Refuse what can be known to fail before a transport is joined, or a weight touched.

        Raises:
            ManifestError: the trainer's parameters cannot land here.
            ConfigError: the offer names what this engine may not open.
        """
        for name in ("root", "base", "local_dir"):
            if message.offer.get(name) is not None:
                admit(message.offer[name], made=name == "local_dir")
        self._require_loader().check(message.params)

    def connect(self, message: Join) -> None:
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
        if self._transport is not None:
            self._transport.shutdown()
        info = message.info()
        try:
            self._transport = kind.from_info(info)
            self._transport.want(loader.slices(), loader.whole())
            self._transport.join({**info, "rank": message.rank_offset + self._rank})
        except KeyError as error:
            raise _incomplete(f"the offer of transport {message.transport!r}", error) from error
        self._transport.incremental.retain(lambda name: not loader.patchable(name))
        self._joined, self._staged, self._followed = True, None, False
        self._expect(None)

    def rehearse(self, message: Rehearse) -> Info:
        """Show that an update's route leads to the same state as a cold start (`torchrl_ext.proof.rehearsal`).

        Returns:
            ``needed`` (to an ``ask``: it would be done), ``proof`` (`WeightLoader.proof`) and what it showed.

        Raises:
            EngineRefusedError, IntegrityError: the route does not lead there.
        """
        loader = self._require_loader()
        needed = message.how != "never" and loader.unrehearsed(again=message.how == "always")
        if needed and not message.ask:
            try:
                loader.rehearse()
            except IntegrityError:
                self.torn = True  # the weights from before could not be put back
                raise
            needed = False
        return {"needed": needed, "proof": loader.proof(), **loader.rehearsal()}

    def prefetch(
        self,
        version: int,
        part: Part | None = None,
        *,
        files: Sequence[str] | None = None,
        label: str | None = None,
    ) -> None:
        """Fetch, check, decode and stage ``version``, as far as that can be done while the engine serves.

        Args:
            version: the version that comes.
            part: which tensors it brings, where these are not all, and the version that has the others.
            files, label: as in `Prefetch`.

        Raises:
            IntegrityError: the model does not hold what the part builds on.
            ManifestError: some tensors of the part land only together with others.
            WeightSyncError: the version cannot be had. In all cases the engine goes on with what it serves.
        """
        transport, loader, self._staged = self._require_transport(), self._require_loader(), None
        origins = self._origins
        if part is not None:
            self._require_base(part.base)
        if part is not None or self._part is not None:
            self._expect(part)
        label = label if self._intact else None  # weights that the engine loaded by itself have labels too
        if files is not None or label is not None or self._announced:
            self._announced = files is not None or label is not None
            transport.incremental.expect(version, files, label)
        changes = transport.incremental.prefetch(version, loader.position_digests if self._intact else None)
        if changes is not None:
            try:
                loader.stage(changes)
            except IntegrityError:
                self._intact = False  # whatever the model holds, the next version does not build on it
                raise
            self._staged = changes
        if self._origins != origins:  # in another thread: the engine serves while this goes on
            self._staged = None
            self._expect(None)
            raise IntegrityError(
                f"the engine loaded other weights while version {version} was staged",
                expected="the weights that its changes begin with",
                state=f"version {version} did not land, and the engine goes on with what it loaded",
                hint="send again: the next update is sent whole",
            )

    def _require_base(self, base: int) -> None:
        """Refuse a part whose other tensors are not those that the model holds."""
        if self._intact and not self.empty and self._landed == base and (self._followed or base == 0):
            return
        holds = f"version {self._landed}"
        if self.empty or not self._intact:
            holds = "no weights" if self.empty else "parts of several versions, or weights of another origin"
        raise IntegrityError(
            f"some tensors of a model were sent to stay beside those of version {base}, and this one holds {holds}",
            expected=f"version {base}, whole, from this trainer",
            state="nothing was changed; the engine serves what it served",
            hint="send again: the next update is sent whole",
        )

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
            try:
                self._require_loader().confirm()
            except IntegrityError:
                self._staged, self._intact = None, False
                raise

    def start(self) -> None:
        """Make ready to load; the engine is idle, and what torch keeps of the device's memory is there for the load."""
        self._require_transport()
        self._sealed = False
        if self._staged is None:
            self._intact = False
            free_cached()
            self._require_loader().start()

    def load(self, message: Load) -> None:
        """Land one handoff, or the staged changes where they are of its version."""
        loader = self._require_loader()
        transport, staged, self._staged = self._require_transport(), self._staged, None
        if staged is not None and staged.reached[1] == message.version:
            self._landed, self._intact, self.torn = message.version, False, True
            loader.commit()
            transport.incremental.landed(staged)
            return
        if message.handoff.get("onto") != (None if self._part is None else self._part.base):
            raise IntegrityError(
                f"version {message.version} comes as {'all' if self._part else 'some'} tensors of a model, which was "
                "not announced",
                expected="what the prefetch before it said",
                hint="send again: the next update is sent whole",
            )
        if self._intact:  # what was staged is another version
            self._intact = False
            loader.start()
        self._landed, self.torn = message.version, True  # a transport may fill the model's own memory
        with closing(_passed_on(transport.receive(message.info(), loader.targets()))) as pairs:
            loader.load(pairs)

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
        self._require_loader().finish()
        free_cached()
        self._sealed = True

    def finish(self, version: int) -> None:
        """Note that the model holds ``version``, of which everything arrived; end the load if `seal` did not."""
        if not self._sealed:
            self._require_loader().finish()
            free_cached()
        self._sealed = self.empty = self.torn = False
        self._intact = self._followed = True
        self.version = version
        if self._part is not None:
            self._expect(None)

    def invalidate(self, *, empty: bool = False) -> None:
        """Note that the model holds something else than what landed here: the next version does not build on it.

        Args:
            empty: it holds nothing, until an update fills it.
        """
        self._origins += 1  # before the rest, as a version may be staged in another thread
        self._staged, self._intact, self.empty = None, False, empty
        self._expect(None)
        self._require_loader().invalidate()

    def reloaded(self) -> None:
        """Note that the engine loaded a whole checkpoint by itself."""
        self.torn = False
        self._require_loader().reloaded()

    def abort(self) -> None:
        """Unblock a wait in another thread."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Leave the transport. May be called twice."""
        if self._transport is not None:
            self._transport.shutdown()
            self._transport, self._joined = None, False

    # used alone: methods with TorchRL's names

    def register_model(self, model: Any) -> None:
        """Set where weights land; in place of another model, a trainer that joined for that one has to join again."""
        loader, first = as_loader(model), self._loader is None
        if self._joined:
            self.close()
        self._target, self._loader = model, loader
        self._staged, self._part, self._intact, self.empty = None, None, first, False

    def init_all_workers_group(self, model_metadata: Mapping[str, tuple[torch.dtype, Any]], **_: Any) -> None:
        """Connect the worker end of a collective transport; other transports need no group."""
        self._alone().init_all_workers_group(model_metadata)

    def poll_and_apply(self, timeout: float | None = 0.0) -> bool:
        """Apply the newest version if one came within ``timeout`` seconds; return whether one did."""
        received = self._alone().receive_weights(timeout, model=self._loader)
        if received is not None:
            self.version = self._alone().received_version
        return received is not None

    def apply_weights(self, weights: Any) -> None:
        """Land ``weights`` (TensorDict or mapping) directly."""
        from torchrl_ext.weights.source import as_source

        source, loader = as_source(weights), self._require_loader()
        loader.check(source.params())
        self.invalidate(empty=self.empty)
        self.torn = True
        loader.start()
        loader.load(source)
        loader.finish()
        self.empty = self.torn = False

    def _require_loader(self) -> WeightLoader:
        if self._loader is None:
            raise NotConnectedError("this receiver has no model", hint="call register_model(model)")
        return self._loader

    def _require_transport(self) -> Transport:
        if self._transport is None:
            raise NotConnectedError("this receiver joined no transport", hint="connect first")
        return self._transport

    def _alone(self) -> StandaloneTransport:
        return cast(StandaloneTransport, self._require_transport())  # none but one that was given to be used alone


def _passed_on(pairs: Iterator[tuple[str, Tensor]]) -> Generator[tuple[str, Tensor], None, None]:
    """Yield the same pairs; closing this drops the transport's iterator, which an error's traceback could keep open."""
    try:
        yield from pairs
    except KeyError as error:
        raise _incomplete("the handoff", error) from error


def _incomplete(what: str, error: KeyError) -> ConfigError:
    """Return the error for a field that the transport's other end should have sent."""
    return ConfigError(f"{what} has no {error}", state="unchanged", hint="use one release of torchrl_ext on both ends")
