"""`WeightSender` sends a policy's weights to engines: a transport moves them, and an engine client says when."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from torchrl_ext.deadline import in_background
from torchrl_ext.errors import (
    ConfigError,
    DeadlineError,
    NotConnectedError,
    TransportError,
    UpdateError,
    WeightSyncError,
    why,
)
from torchrl_ext.messages import REPLACED
from torchrl_ext.proof.outputs import Compute, Outputs, Probe
from torchrl_ext.rpc.client import EngineClient
from torchrl_ext.sync.connection import Connection, Spans, client_of, parts_of
from torchrl_ext.sync.only import Only, chosen, trainable
from torchrl_ext.sync.outgoing import Outgoing, Ranks, bump
from torchrl_ext.transports.base import TransferStats, Transport
from torchrl_ext.transports.ranks import drives
from torchrl_ext.types import PROOFS, Handoff, ParamMeta, Part, SyncReport, least
from torchrl_ext.weights.derived import as_mapper, converted
from torchrl_ext.weights.source import (
    MappingSource,
    WeightSource,
    as_source,
    inner_model,
    is_tensordict_module,
    source_of_module,
)

__all__ = ["WeightSender"]

log = logging.getLogger("torchrl_ext")


class WeightSender:
    """Keeps engines at the policy's newest weights.

    Args:
        transport: moves the bytes.
        engine: tells engines what to do and when (a client or a fleet), or the address of an engine, which rank 0
            connects to; None for the data layer alone.
        mapper: trainer name -> checkpoint name; a callable or a table of regular expressions.
        dtype: cast floating-point tensors to this dtype on the way out.
        verify: every engine compares a digest of each tensor with the trainer's before a version is in service; engines
            that cannot (`EngineClient.verifies`) are not asked, and the report says so. ``"outputs"``: besides that,
            every engine that serves the version computes log-probabilities of a probe, which are compared with the
            trainer's; one that is further off than ``max_gap`` is paused, and the update fails. Some requests
            in between were answered by such an engine.
        rehearse: when an engine that processes its weights shows that an update leads to the same state as a
            cold start (`torchrl_ext.proof.rehearsal`): ``"once"`` per start of the engine, before its first update;
            ``"never"``, and then `SyncReport.proof` is no more than ``"sent"`` there; ``"always"``, with every
            connection before which nothing was loaded.
        rank: this trainer process's rank; None takes that of torch, or 0. Only rank 0 talks to engines
            and moves bytes; other ranks call `update_weights` too, replay the same gathers, and learn from rank 0 which
            version is in service.
        max_gap: of ``verify="outputs"``: the largest accepted difference of a log-probability, in nats; ``"dtype"``
            takes `torchrl_ext.proof.outputs.bound_of` what travels (1e-3 in float32, 1.0 in bfloat16), and None reports
            and refuses nothing.
        probe: of ``verify="outputs"``: a function of token ids that returns the trainer's own log-probabilities, on
            every trainer rank, or a `torchrl_ext.proof.outputs.Probe`; None runs the registered model, a causal LM of
            `transformers`, on random tokens.

    Attributes:
        engine: the client of the engines; for the data layer alone, a client that drives none.
        version: the version in service; 0 before the first.

    Raises:
        ConfigError: settings that cannot work.
        EngineError, DeadlineError: no engine answers at the address.

    Example:
        >>> sender = tx.WeightSender(tx.make_transport("delta", root=root), tx.connect(address))
        >>> sender.register_model(lm)
        >>> report = sender.update_weights()
        >>> report.version, report.verified, report.proof
        (1, True, 'in place')
        >>> sender.shutdown()
    """

    def __init__(
        self,
        transport: Transport,
        engine: EngineClient | str | None = None,
        *,
        mapper: Callable[[str], str] | Mapping[str, str] | None = None,
        dtype: torch.dtype | None = None,
        verify: bool | str = True,
        rehearse: str = "once",
        rank: int | None = None,
        max_gap: float | str | None = "dtype",
        probe: Compute | Probe | None = None,
    ) -> None:
        if rehearse not in ("once", "never", "always"):
            raise ConfigError(f"there is no rehearse={rehearse!r}", expected="'once', 'never' or 'always'")
        self._wanted, self._rehearse = bool(verify), rehearse
        self._verify = self._wanted and engine is not None
        engine = client_of(transport, engine, rank)
        self._transport = transport
        self._mapper, self._dtype, self._rank = mapper, dtype, rank
        self._outputs = Outputs.wanted(verify, max_gap, probe)
        self._ranks = Ranks(transport.timeout_s)
        self._model: Callable[[], Any] = lambda: None
        self._read: Callable[[Any], WeightSource] = as_source
        self._collectors: list[weakref.ref[Any]] = []
        self._connect_to(engine)
        self._spans = Spans()
        self._attempted = 0
        self._held: int | None = None
        self.version = 0

    # methods with TorchRL's names

    def register_model(self, model: Any) -> None:
        """Remember what to send: a module, TensorDict, mapping, checkpoint directory or WeightSource; held weakly.

        TorchRL's LLM wrappers stand for the model inside, whose names engines know.
        """
        model = inner_model(model)
        is_module = isinstance(model, nn.Module) and not is_tensordict_module(model)
        self._read = source_of_module if is_module else as_source
        try:
            self._model = weakref.ref(model)
        except TypeError:  # plain dicts and strings take no weak reference
            self._model = lambda: model

    def register_collector(self, collector: Any) -> None:
        """Bump this collector's policy version after each accepted update, on every trainer rank; held weakly.

        One that raises is logged: the engines have the weights then.
        """
        if all(known() is not collector for known in self._collectors):
            self._collectors.append(weakref.ref(collector))

    def init_all_workers_group(
        self,
        model_metadata: Mapping[str, tuple[torch.dtype, Any]] | None = None,
        vllm_engine: EngineClient | None = None,
    ) -> None:
        """Connect the engines' workers to the transport. `update_weights` does it where it was not done.

        Args:
            model_metadata: ``{name: (dtype, shape)}`` in checkpoint coordinates; derived from the model if omitted.
            vllm_engine: an engine client, in place of the one given at construction.
        """
        if vllm_engine is not None:
            self._verify = self._wanted
            self._connect_to(vllm_engine)
        if model_metadata is None:
            params = self._outgoing(None).params()
        else:
            params = tuple(ParamMeta(name, dtype, tuple(shape)) for name, (dtype, shape) in model_metadata.items())
        if drives(self._rank):
            self._connection.ensure(params, self._spans)

    def update_weights(self, weights: Any = None, *, only: Only | None = None) -> SyncReport:
        """Send the registered model's weights, or ``weights``, as the next version.

        Args:
            weights: the whole model, in place of the registered one.
            only: which tensors may differ from what was sent last (`torchrl_ext.sync.only.Only`); the same on every
                trainer rank. These alone are sent, where all engines serve what was sent last; else everything is,
                after a failure or with a new engine for example, and `SyncReport.part` says so. Where engines refuse
                them alone, and serve what they served, everything is sent at once by a trainer of one rank.

        Returns:
            What was done, with a row per engine.

        Raises:
            ManifestError, ConfigError: ``only`` means none of the tensors, or names one that is not sent.
            WeightSyncError: the update failed; the message says which engines serve what.
        """
        with self._transport.exclusive("update_weights"), self._connection.turn():
            self._ranks.call()
            report, accepted = self._lead(weights, only) if drives(self._rank) else self._follow(weights, only)
        for _ in range(accepted):
            bump(self._collectors)
        return report

    def check_connection(self) -> bool:
        """Return whether the transport is connected."""
        return self._transport.check_connection()

    def shutdown(self) -> None:
        """Leave the engines and release the transport; engines keep serving what they have."""
        self._connection.drop()
        try:
            self.engine.close()
        finally:
            self._transport.shutdown()

    def holds(self, version: int) -> None:
        """Note that the engines hold ``version`` when they join for the first time, so that a part can build on it.

        Args:
            version: 0: the weights that they were started with, which the caller knows.
        """
        self._held = version

    def _lead(self, weights: Any, only: Only | None) -> tuple[SyncReport, int]:
        """Drive an update, and return its report, and that one more was accepted; tell the other ranks how it ends."""
        started, begun, failure = time.perf_counter(), None, None
        try:
            source, names = self._begun(weights, only)
            begun = source
            if self._ranks.shared:
                self._ranks.begin()
            report = self._drive(source, weights, started, names)
        except BaseException as error:
            failure = error
            raise
        finally:
            if begun is not None and only is not None and not begun.decided:
                self._decide(begun, None)
            self._transport.dismiss(begun, failure)
            if self._ranks.shared:
                self._ranks.end(self.version, begun=begun is not None, accepted=failure is None)
        log.info("weights version %d accepted by %d engine(s)", self.version, len(report.engines))
        return report, 1

    def _begun(self, weights: Any, only: Only | None) -> tuple[Outgoing, frozenset[str] | None]:
        registered = self._model()
        if self._ranks.shared and registered is not None:
            with suppress(WeightSyncError):  # which is raised where it matters
                self._ranks.join(lambda: self._read(registered))
        source = self._outgoing(weights)
        return source, None if only is None else chosen(only, source, self._trained(weights))

    def _drive(self, source: Outgoing, weights: Any, started: float, names: frozenset[str] | None = None) -> SyncReport:
        compared: AbstractContextManager[None] = nullcontext()
        source.version = max(self.version, self._attempted) + 1  # until the transport and the engines say more
        try:
            if self._outputs is not None:
                compared = self._outputs.compared(self.engine, source, weights, self._model())
            self._spans, self._transport.stats = Spans(), TransferStats()
            try:
                source.version = self._next_version()
                with compared:
                    self._deliver(source, names)
            except BaseException:
                self._connection.drop()  # what is left of a group or a half-made update is not built upon
                raise
        except Exception as error:
            report = self._report(source.version, source, started, failed=True)
            raise UpdateError(  # whatever it is, the caller learns which engine serves what
                f"weights version {source.version} did not reach every engine: {why(error)}",
                report=report,
                rows=report.engines,
                **parts_of(error, report.engines),
            ) from error
        self.version = self._connection.delivered = source.version
        return self._report(self.version, source, started)

    def _follow(self, weights: Any, only: Only | None) -> tuple[SyncReport, int]:
        """Take part in the gathers, on a rank that does not drive, and wait for what became of the update.

        Returns:
            A report, and how many updates were accepted since this rank last heard of one.
        """
        try:
            source, names = self._begun(weights, only)
            source.begins = self._ranks.begins
            if self._outputs is not None and source.begins():
                self._outputs.asked(weights, self._model())
            if names is not None and source.store is not None and source.begins():
                base = self._ranks.hear_part()
                source.limit(None if base is None else Part(base=base, names=names))
        except BaseException as error:
            self._transport.dismiss(None, error)
            raise
        self._transport.follow(source)
        self.version, accepted = self._ranks.ended(self.version + 1)
        if not accepted:
            log.warning("trainer rank 0 could not put an update in service; engines serve version %d", self.version)
        return SyncReport(version=self.version, transport=self._transport.name), accepted

    def _deliver(self, source: Outgoing, names: frozenset[str] | None) -> None:
        """Send one version to every engine that answers.

        A broadcast in which an engine is lost fails for its whole group: the others get the version in another one,
        before the caller is told of the loss. Where another sender joined an engine after this one did, the engines
        join again, once.
        """
        lost: WeightSyncError | None = None
        again = source.store is None  # other trainer ranks gather once
        while True:
            if source.part is not None:  # of an attempt before
                source.limit(None)
            if self._connection.ensure(source.params(), self._spans):
                self._transport.renew()
            if self._held is not None and self.version == self._attempted == self._connection.newest == self._held:
                self._connection.delivered = self._held
            self._held = None
            version = source.version = self._next_version()
            if names is not None:
                self._decide(source, names)
            source.digesting = self._verify and self.engine.verifies and not self._transport.proves
            try:
                self._update(source, version)
            except WeightSyncError as error:
                if self._refused(source, error):
                    log.warning("weights version %d brought a part, and everything is sent now: %s", version, error)
                    self._connection.drop()
                    names = None
                    continue
                if again and REPLACED in str(error):
                    log.warning("weights version %d is sent again, by a new connection: %s", version, error)
                    self._connection.drop()
                    self._transport.renew()
                    names, again = None, False
                    continue
                if source.store is not None or self._connection.reached(version) or not self._connection.shrank():
                    raise
                log.warning("weights version %d is sent again, to the engines that are left: %s", version, error)
                lost = lost or error
                continue
            if lost is not None:
                raise lost
            return

    def _decide(self, source: Outgoing, names: frozenset[str] | None) -> None:
        """Send these tensors alone, if every engine serves what was sent last; tell the other trainer ranks."""
        base, source.decided = self.version, True
        if names is not None and self._connection.delivered == base == self._attempted:
            told = not self._transport.parts or self.engine.takes_parts
            if self._connection.all_serve(base) and told and self._transport.builds_on(base):
                source.limit(Part(base=base, names=names), narrow=self._transport.parts)
        self._ranks.tell_part(source.part)

    def _refused(self, source: Outgoing, error: WeightSyncError) -> bool:
        """Return whether engines did not take a part, of which no other trainer rank was told, and changed nothing."""
        if source.told is None or source.store is not None or isinstance(error, (DeadlineError, TransportError)):
            return False
        return self._connection.all_serve(self.version)

    # one update, phase by phase

    def _update(self, source: Outgoing, version: int) -> None:
        self._attempted = version  # from here on somebody may have seen it: this number stands for no other weights
        with self._spans.of("prepare"):
            handoff = self._transport.prepare(source, version)
        staging, info = partial(self._prefetch, source.told), {**handoff.info, **source.onto}
        with self._spans.of("prefetch"), in_background(staging, version, self._transport.abort):
            handoff.ahead()  # engines still generate: they fetch, check, decode, stage
        with self._spans.of("pause"), self.engine.updating(version):  # paused only from here
            with in_background(self.engine.load, info, self._transport.abort):
                handoff.transfer()  # a collective runs beside the call; disk has nothing left to do
            self.engine.verify(source.digests)
        self._acknowledge(handoff, version)

    # its helpers

    def _acknowledge(self, handoff: Handoff, version: int) -> None:
        try:
            handoff.acknowledge(self.engine.oldest(version))
        except Exception:
            log.error("weights version %d is in service, but its transport raised afterwards", version, exc_info=True)

    def _prefetch(self, part: Part | None, version: int, _: Callable[[], None]) -> None:
        self.engine.prefetch(version, part)

    def _trained(self, weights: Any) -> Callable[[], frozenset[str]] | None:
        """Return what tells the names of trainable parameters, as they are sent; None where no module does."""
        module = self._model() if weights is None else inner_model(weights)
        if not isinstance(module, nn.Module) or is_tensordict_module(module):
            return None
        rename = as_mapper(self._mapper or {})
        return lambda: frozenset(map(rename, trainable(module)))

    def _outgoing(self, weights: Any) -> Outgoing:
        registered = self._model()
        if weights is None and registered is None:
            raise NotConnectedError(
                "there are no weights to send", hint="call register_model(policy) and keep the policy alive"
            )
        source = self._read(registered) if weights is None else as_source(weights)
        if isinstance(source, MappingSource) and isinstance(registered, nn.Module):
            source = converted(source, registered)  # a module's own names become those of its checkpoint
        if self._ranks.shared:
            self._ranks.join(lambda: source)
        return Outgoing(source, mapper=self._mapper, dtype=self._dtype)

    def _next_version(self) -> int:
        """Return the next version number, which neither a failed attempt nor another sender has used."""
        return max(self.version, self._attempted, self._connection.newest, self._transport.latest_version()) + 1

    def _connect_to(self, engine: EngineClient) -> None:
        """Drive ``engine`` from now on; its workers join before the next version."""
        compares = self._verify and not self._transport.proves
        self.engine, self._connection = (
            engine,
            Connection(engine, self._transport.open, self._transport.abort, compares=compares, rehearse=self._rehearse),
        )

    def _report(self, version: int, source: Outgoing, started: float, failed: bool = False) -> SyncReport:
        stats = self._transport.stats
        moved = source.bytes if stats.bytes is None else stats.bytes
        asked = self._verify and self.engine.verifies
        rows = []
        for row in self.engine.rows():
            proves = asked and (row.state, row.version) == ("serving", version)
            rows.append(row if proves else replace(row, proof=PROOFS[0]))
        spans = {**self._spans, **stats.spans, "total": time.perf_counter() - started}
        if self._outputs is not None:
            rows = self._outputs.noted(rows)
            spans |= self._outputs.spans
        proof = PROOFS[0] if failed else least(map(attrgetter("proof"), rows))
        return SyncReport(
            version=version,
            transport=self._transport.name,
            tensors=source.count,
            bytes=moved,
            model_bytes=source.model_bytes,
            density=0.0 if failed and not moved else stats.density,
            spans=spans,
            engines=tuple(rows),
            verified=proof != PROOFS[0],
            proof=proof,
            rank_bytes=stats.rank_bytes,
            worker_bytes=stats.worker_bytes,
            whole=stats.whole,
            part=source.part is not None and not failed,
        )
