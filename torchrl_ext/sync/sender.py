"""`WeightSender` sends a policy's weights to engines: a transport moves the data, an engine client controls engines."""

from __future__ import annotations

import logging
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchrl_ext.base.deadline import Deadline, beside
from torchrl_ext.base.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    NotConnectedError,
    TransportError,
    UpdateError,
    WeightSyncError,
    code_of,
    why,
)
from torchrl_ext.base.reports import PROOFS, Log, Logs, Phase, Spans, SyncReport, least
from torchrl_ext.base.types import Info, ParamMeta, Part
from torchrl_ext.control.client import EngineClient, Manner, NullEngine
from torchrl_ext.control.discovery import connect
from torchrl_ext.data.group.ranks import Steps, TrainerRanks, drives, numbered
from torchrl_ext.data.transports.base import (
    Arrival,
    Handoff,
    TransferStats,
    Transport,
    Update,
    exclusive,
    passing,
    steps_of,
)
from torchrl_ext.data.transports.standalone import StandaloneTransport
from torchrl_ext.data.update_source import UpdateSource, named
from torchrl_ext.data.weights.derived import as_source, converted
from torchrl_ext.data.weights.digests import digest_of
from torchrl_ext.data.weights.shared import differing, shared_in, tied_by_config, two_values
from torchrl_ext.data.weights.source import MappingSource, inner_model
from torchrl_ext.sync.connection import Connection, update_error
from torchrl_ext.sync.outputs import Compute, Outputs, Probe

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["WeightSender"]

log = logging.getLogger("torchrl_ext")


class WeightSender:
    """Keeps engines at the policy's newest weights.

    Use it in a ``with`` statement, which calls `shutdown` at its end.

    Args:
        transport: moves the weights.
        engine: client of one engine or of a fleet, or the address of an engine, to which rank 0 connects; None uses the
            data layer without engines.
        mapper: trainer name -> checkpoint name.
        dtype: cast floating-point tensors to this dtype before sending.
        verify: every engine compares its digest of each tensor with the trainer's before it serves a version. Engines
            that cannot (`EngineClient.verifies`) are skipped, and the report says so. With ``"outputs"``, every engine
            that serves the version also computes log-probabilities of a probe; if they differ from the trainer's by
            more than ``max_gap``, the engine is paused and the update fails, but it may have answered some requests
            with the version by then. Where engines take the version while they serve, the first one is asked before
            the others take it; if it differs, all serve the previous version.
        rehearse: when an engine that processes its weights has to show that an update leads to the same state as a cold
            start (`torchrl_ext.engines.rehearsal`): ``"once"`` per start of the engine, before its first update; or
            ``"never"``, which leaves `SyncReport.proof` at ``"sent"`` for that engine.
        commit: ``"auto"`` writes changes into the engine's weights between two of its steps, while it serves: no
            request is stopped, running ones go on with their keys and values, and later ones share none with them (as
            `pause_mode` ``"keep"`` with a cache per version). Where that is not possible, the engine is paused, and
            `EngineRow.commit` says why. ``"paused"`` always pauses. ``"live"`` refuses changes that need a pause; a
            version that is sent whole still pauses.
        policy: what becomes of a version that some engines of a fleet did not take: ``"best_effort"`` leaves it in the
            others; ``"all"`` takes it back, so that all that answer serve one version. An engine that got the version
            whole cannot go back, and is paused instead.
        finite: refuse weights with a NaN or an infinity, before the pause if this process holds the tensor or the
            transport reads all tensors before it. If every trainer rank sends, each rank checks its own blocks. False
            does not look, which saves a read of all weights.
        rank: this trainer process's rank; None takes torch's rank, or 0. Only rank 0 talks to engines and moves
            weights; the other ranks also call `update_weights`, take part in gathers, and learn from rank 0 which
            version is in service.
        max_gap: for ``verify="outputs"``, the largest accepted difference of a log-probability, in nats; ``"dtype"``
            takes it from the dtypes sent (`torchrl_ext.sync.outputs.bound_of`: 1e-3 for float32, 1.0 for bfloat16);
            None only reports the difference.
        probe: for ``verify="outputs"``, a function on every trainer rank that takes token ids and returns the trainer's
            log-probabilities, or a `torchrl_ext.sync.outputs.Probe`; None runs the registered model, which must be a
            causal LM of `transformers`, on random tokens.

    Attributes:
        engine: client of the engines; a client without engines if ``engine`` is None.
        version: the version in service; 0 before the first.

    Raises:
        ConfigError: the settings are invalid.
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
        mapper: Callable[[str], str] | None = None,
        dtype: torch.dtype | None = None,
        verify: bool | str = True,
        rehearse: str = "once",
        commit: str = "auto",
        policy: str = "best_effort",
        finite: bool = True,
        rank: int | None = None,
        max_gap: float | str | None = "dtype",
        probe: Compute | Probe | None = None,
    ) -> None:
        if rehearse not in ("once", "never"):
            raise ConfigError(f"there is no rehearse={rehearse!r}", expected="'once' or 'never'")
        if commit not in ("auto", "live", "paused"):
            raise ConfigError(f"there is no commit={commit!r}", expected="'auto', 'live' or 'paused'")
        if policy not in ("best_effort", "all"):
            raise ConfigError(f"there is no policy={policy!r}", expected="'best_effort' or 'all'")
        self._manner = Manner(commit=commit, policy=policy)
        self._verify, self._rehearse, self._finite = bool(verify), rehearse, finite
        engine = _client_of(transport, engine, rank)
        self._transport = transport
        self._mapper, self._dtype = mapper, dtype
        self._outputs = Outputs.wanted(verify, max_gap, probe)
        self._ranks = transport.ranks = TrainerRanks(numbered("sender"), transport.timeout_s, rank=rank)
        self._model: Callable[[], Any] = lambda: None
        self._collectors: list[weakref.ref[Any]] = []
        self._logs = Logs()
        self._spans, self._stats = Spans(), TransferStats()
        self._attempted, self._run = 0, uuid.uuid4().hex
        self._refused: frozenset[str] | None  # names of a partial update that these engines refused
        self._rows: tuple[tuple[ParamMeta, ...], list[Any]] = (), []
        self._connect_to(engine)
        self.version = 0

    # TorchRL's method names

    def register_model(self, model: Any) -> None:
        """Set the model to send: a module, TensorDict, mapping, checkpoint directory or WeightSource; held weakly.

        For a TorchRL LLM wrapper, the sender takes the model inside, whose parameter names engines know.
        """
        model = inner_model(model)
        try:
            self._model = weakref.ref(model)
        except TypeError:  # plain dicts and strings do not support weak references
            self._model = lambda: model

    def register_collector(self, collector: Any) -> None:
        """Increment this collector's policy version after each accepted update, on every trainer rank; held weakly.

        An error of the collector is logged, not raised, because the engines already serve the weights.
        """
        self._collectors.append(weakref.ref(collector))

    def log_to(self, *logs: Log) -> None:
        """Log the report of every update from now on, and of every failed one; only rank 0 logs.

        Logs run before `update_weights` returns. A log that raises is logged as a warning, and the update goes on.

        Args:
            logs: each one a TorchRL logger (CSV, TensorBoard, W&B), which gets `SyncReport.scalars` with the version as
                step, and the number of failed updates so far as ``sync/failures``; or a function that takes a
                `SyncReport`, whose `SyncReport.error` says why an update failed.

        Raises:
            ConfigError: a log is of none of these kinds.
        """
        self._logs.add(*logs)

    def init_all_workers_group(
        self,
        model_metadata: Mapping[str, tuple[torch.dtype, Any]] | None = None,
        vllm_engine: EngineClient | None = None,
    ) -> None:
        """Connect the engines' workers to the transport; without this call, `update_weights` does it.

        Args:
            model_metadata: ``{name: (dtype, shape)}`` in checkpoint coordinates; derived from the model if omitted.
            vllm_engine: an engine client that replaces the one given at construction.

        Raises:
            ConcurrentUpdateError: an update is running; it continues.
        """
        with exclusive(self._transport, "init_all_workers_group"):
            if vllm_engine is not None:
                self._connect_to(vllm_engine)
            if model_metadata is None:
                params = self._source().params()
            else:
                params = tuple(ParamMeta(name, dtype, tuple(shape)) for name, (dtype, shape) in model_metadata.items())
            self._join(params)

    def _join(self, params: tuple[ParamMeta, ...]) -> None:
        if self._transport.abilities.gathers:  # the other ranks take no part
            if self._ranks.drives:
                self._connection.ensure(params, self._spans)
        elif self._ranks.drives:
            with self._ranks.leading() as session:
                session.version = self.version
                self._connection.ensure(params, self._spans)
        else:
            self._ranks.following(lambda: steps_of(self._transport, self._source()))

    def update_weights(self, weights: Any = None, *, only: Collection[str] | None = None) -> SyncReport:
        """Send the registered model's weights, or ``weights``, as the next version.

        Args:
            weights: the whole model, instead of the registered one.
            only: names of the tensors that may differ from the last update, as they are sent, the same on every trainer
                rank. If all engines serve the last update, only these are sent; otherwise (after a failure or
                with a new engine, for example) all are, and `SyncReport.part` is False. If engines refuse a partial
                update and still serve the previous version, a trainer with one rank sends all tensors at once.

        Returns:
            The report, with one row per engine.

        Raises:
            ConcurrentUpdateError: another thread sends through this transport.
            ManifestError: ``only`` is empty or names a tensor that is not sent; or a tensor that this process holds has
                a NaN or an infinity.
            ConfigError: the transport sends whole models only (it lacks the ability ``parts``).
            WeightSyncError: the update failed; the message says what each engine serves.
        """
        with exclusive(self._transport, "update_weights"):
            report = self._lead(weights, only) if self._ranks.drives else self._follow(weights, only)
        _bump(self._collectors)
        return report

    def check_connection(self) -> bool:
        """Return whether the transport is connected."""
        return self._transport.check_connection()

    def shutdown(self) -> None:
        """Leave the engines and release the transport; engines keep serving their weights."""
        try:
            self._connection.close()
        finally:
            self._transport.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.shutdown()
        except Exception:
            if error is None:
                raise
            log.error("the sender was shut down after another error, and raised", exc_info=True)

    def holds(self, version: int) -> None:
        """Note that the engines already hold ``version`` (0: their start weights), so the first may be partial."""
        self._connection.delivered = version

    def _lead(self, weights: Any, only: Collection[str] | None) -> SyncReport:
        started = time.perf_counter()
        try:
            with self._ranks.leading() as session:
                source = self._source(weights, only)
                report = self._drive(source, weights, started)
                session.version = self.version
        except UpdateError as error:
            if error.report is not None:
                self._logs(error.report)
            raise
        log.info("weights version %d accepted by %d engine(s)", self.version, len(report.engines))
        self._logs(report)
        return report

    def _follow(self, weights: Any, only: Collection[str] | None) -> SyncReport:
        """Follow rank 0's orders on another rank, and return a report."""

        def own_steps() -> Steps:
            source = self._source(weights, only)

            def outputs(_: Info) -> None:
                if self._outputs is not None:
                    self._outputs.asked(weights, self._model())

            steps = steps_of(self._transport, source)

            def compare(order: Info) -> None:
                for _ in source.whole.pairs(order["names"]):
                    pass

            own: Steps = {"limit": lambda order: source.limit(order["base"]), "outputs": outputs, "compare": compare}
            return {**own, **steps}

        version = self._ranks.following(own_steps, apart=("outputs", "gather"))
        self.version = self.version + 1 if version is None else version
        return SyncReport(version=self.version, transport=self._transport.name)

    def _drive(self, source: UpdateSource, weights: Any, started: float) -> SyncReport:
        compared: AbstractContextManager[None] = nullcontext()
        manner = self._manner
        self._spans, self._stats, source.version = Spans(), TransferStats(), self._attempted + 1
        try:
            source.version = self._next_version()
            if self._outputs is not None:
                self._ranks.session.order("outputs")
                asked = self._outputs.asked(weights, self._model())
                compared = self._outputs.compared(self.engine, self._connection.rows, source, asked)
                manner = replace(manner, canary=self._outputs.canary)
            try:
                with compared:
                    self._deliver(source, manner)
            except BaseException as error:
                if isinstance(error, EngineError):
                    self._connection.note(error.rows)
                self._connection.drop()  # the next update must not build on a broken group or an incomplete update
                raise
        except Exception as error:
            report = self._report(source, started, error)
            # for any error, tell the caller what each engine serves
            begun = self._attempted == source.version  # else the number is free again
            what = f"weights version {source.version}" if begun else "the weights"
            raise update_error(error, what, report.engines, report) from error
        self.version = self._connection.delivered = source.version
        return self._report(source, started)

    def _deliver(self, source: UpdateSource, manner: Manner) -> None:
        """Send one version to every engine that answers.

        Send all tensors again if engines refuse a partial update, do not hold its base, or were joined by another
        sender. If a broadcast loses an engine, it fails for the whole group: send the version to the remaining engines
        in a new group, and then raise the error of the lost one; but not where all or none are to take it.
        """
        lost: WeightSyncError | None = None
        anew = False
        while True:
            source.limit(None)
            anew = self._connection.ensure(source.params(), self._spans) or anew
            whole = source.only is None or anew or source.only == self._refused
            base = None if whole else self._connection.delivered
            self._ranks.session.order("limit", base=base)
            source.limit(base)
            source.digest(self._verify and self.engine.verifies and not self._transport.abilities.digests)
            source.version = self._next_version()
            self._refuse_two_values(source)
            try:
                self._update(source, anew, manner)
            except WeightSyncError as error:
                if not anew and self._builds_on_what_is_not_there(source, error):
                    log.warning("weights version %d is sent again, whole: %s", source.version, error)
                    self._connection.drop()
                    anew = True
                elif source.version in self._connection.in_service() or not (
                    manner.policy != "all" and self._connection.shrank()
                ):
                    raise
                else:
                    log.warning("weights version %d is sent to the engines that are left: %s", source.version, error)
                    lost = lost or error
                continue
            if lost is not None:
                raise lost
            return

    def _refuse_two_values(self, source: UpdateSource) -> None:
        """Refuse different values for tensors that an engine keeps in one memory, before any of them is sent.

        Engines that do not say which those are, and readers without an engine, go by the checkpoint's configuration.

        Raises:
            ManifestError: names two such tensors.
        """
        groups = [group for report in self.engine.rehearsed for group in shared_in(report)]
        if not self.engine.verifies:
            groups += tied_by_config(source.whole)
        names = sorted({name for group in groups for name in group})
        if names:
            self._ranks.session.order("compare", names=names)
            tensors = dict(source.whole.pairs(names))
            for group in groups:
                if two := differing(group, tensors):
                    raise two_values(*two)

    def _builds_on_what_is_not_there(self, source: UpdateSource, error: WeightSyncError) -> bool:
        """Return whether engines refused the version's base and changed nothing, so that all tensors can be sent."""
        if code_of(error):
            return True
        if source.part is None or isinstance(error, (DeadlineError, TransportError)):
            return False
        if self._connection.in_service() != {self.version}:
            return False
        self._refused = source.part.names  # by engines without our plugin, or for some tensors of a fused layer
        return True

    # one update, phase by phase

    def _update(self, source: UpdateSource, anew: bool, manner: Manner) -> None:
        update = Update(source=source, version=source.version, anew=anew)
        self._attempted = update.version  # never reused: from here on a worker may have seen it
        within = Deadline(self._transport.timeout_s, f"the workers of {self.engine.url}")
        with passing(self._transport, source):
            with self._spans.of("prepare"):
                handoff = self._transport.prepare(update, within)
            with self._connection.update(update.version, manner) as control:
                with self._spans.of("prefetch"), beside(lambda early: control.stage(self._onto(update)), within):
                    handoff.ahead(within)  # engines fetch, check, decode and stage while they generate
                with self._spans.of("commit"), control.begun():  # engines are paused only in here, if at all
                    info = self._info(update, handoff)
                    with beside(lambda early: control.load(info, early), within):
                        handoff.transfer(within)  # a collective needs both sides at once; disk does nothing here
                    control.verify(source.digests, self._digest(source.digests, handoff))
                    control.commit()
                control.keep()
        self._served(update, handoff)

    def _digest(self, digests: Mapping[str, str], handoff: Handoff) -> str:
        """Return the digest over those of all tensors, of this sender or of the transport, which workers repeat."""
        return digest_of(digests) or (handoff.digest if self._verify else "")

    def _info(self, update: Update, handoff: Handoff) -> Info:
        part = self._onto(update)
        onto = {} if part is None else {"onto": part.base}
        if (params := update.params) != self._rows[0]:
            self._rows = params, [meta.to_json() for meta in params]
        own = {"version": update.version, "params": self._rows[1]}
        return {**own, **onto, "handoff": handoff.info}

    def _onto(self, update: Update) -> Part | None:
        """Return the part to announce to workers; None if the transport itself finds what changed."""
        return None if self._transport.abilities.compares else update.source.part

    def _served(self, update: Update, handoff: Handoff) -> None:
        self._stats = handoff.stats
        try:
            handoff.served(update.version if self.engine.each() else None)
        except Exception:
            log.error("weights version %d is in service, but its transport raised then", update.version, exc_info=True)

    def _source(self, weights: Any = None, only: Collection[str] | None = None) -> UpdateSource:
        if only is not None and not self._transport.abilities.parts:
            raise ConfigError(
                f"a {self._transport.name} transport sends whole models only",
                state="nothing was sent",
                hint="leave only= out, or use another transport",
            )
        registered = self._model()
        if weights is None and registered is None:
            raise NotConnectedError(
                "there are no weights to send", hint="call register_model(policy) and keep the policy alive"
            )
        source = as_source(registered if weights is None else weights)
        if isinstance(source, MappingSource) and isinstance(registered, nn.Module):
            source = converted(source, registered)  # converts the module's parameter names to checkpoint names
        sent = UpdateSource(
            source, mapper=self._mapper, dtype=self._dtype, narrow=not self._transport.abilities.compares
        )
        sent.only = None if only is None else named(only, sent)
        if self._finite:
            sent.require_finite()
        return sent

    def _next_version(self) -> int:
        """Return the next version number that neither a failed attempt nor another sender has used."""
        return max(self._attempted, self._connection.newest, self._transport.latest_version()) + 1

    def _connect_to(self, engine: EngineClient) -> None:
        self.engine, self._refused = engine, None
        how: dict[str, Any] = {"compares": self._verify, "rehearse": self._rehearse, "run": self._run}
        self._connection = Connection(engine, self._transport, **how)

    def _report(self, source: UpdateSource, started: float, error: Exception | None = None) -> SyncReport:
        stats, total = self._stats, time.perf_counter() - started
        moved = source.bytes if stats.bytes is None else stats.bytes
        asked = self._verify and self.engine.verifies
        rows = [
            row if asked and (row.state, row.version) == ("serving", source.version) else replace(row, proof=PROOFS[0])
            for row in self._connection.rows()
        ]
        timed = [self._spans, stats.spans]
        if self._outputs is not None:
            rows = self._outputs.noted(rows)
            timed.append(self._outputs.spans)
        runs = [run for spans in timed if isinstance(spans, Spans) for run in spans.phases]
        phases = [Phase(name, start - started, end - started) for name, start, end in runs]
        proof = PROOFS[0] if error else least(map(attrgetter("proof"), rows))
        return SyncReport(
            version=source.version,
            transport=self._transport.name,
            tensors=source.count,
            bytes=moved,
            model_bytes=source.model_bytes,
            density=0.0 if error and not moved else stats.density,
            spans={name: took for spans in timed for name, took in spans.items()} | {"total": total},
            engines=tuple(rows),
            verified=proof != PROOFS[0],
            proof=proof,
            rank_bytes=stats.rank_bytes,
            worker_bytes=stats.worker_bytes,
            encoding=stats.encoding,
            whole=stats.whole,
            part=source.part is not None and not error,
            error=why(error) if error else None,
            began=time.time() - total,
            run=self._run,
            timeline=tuple(sorted(phases, key=attrgetter("end_s"))),
        )


def _bump(collectors: Iterable[Callable[[], Any]]) -> None:
    """Increment the policy version of each collector that still exists, once."""
    seen: set[int] = set()
    for known in collectors:
        collector = known()
        if collector is None or id(collector) in seen:  # no truth test: it takes len(), which endless collectors lack
            continue
        seen.add(id(collector))
        try:
            collector.increment_version()
        except Exception:
            log.error("a collector did not register the new weights, which are in service", exc_info=True)


def _client_of(transport: Transport, engine: EngineClient | str | None, rank: int | None) -> EngineClient:
    if not isinstance(transport, Transport) or not isinstance(engine, EngineClient | str | None):
        raise ConfigError(
            f"transport is a {type(transport).__name__}, and engine is a {type(engine).__name__}",
            expected="WeightSender(transport, engine), made with make_transport, and with make_engine or connect",
        )
    if isinstance(engine, EngineClient):
        return engine
    if isinstance(engine, str):
        return connect(engine) if drives(rank) else NullEngine()
    if not isinstance(transport, StandaloneTransport):
        raise ConfigError(
            f"workers of a {transport.name} transport learn of a version only through an engine",
            expected="an engine",
            hint="give an engine, or derive the transport from StandaloneTransport",
        )

    def announce(info: Info) -> None:
        within = Deadline(transport.timeout_s, f"the workers of this {transport.name} transport")
        params = tuple(map(ParamMeta.from_json, info["params"]))
        transport.announce(Arrival(version=info["version"], params=params, info=info["handoff"]), within)

    return NullEngine(on_load=announce)
