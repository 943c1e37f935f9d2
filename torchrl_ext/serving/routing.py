"""`Routing` keeps a router limited to engines that are well and serve the newest weights."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, UpdateError, WeightSyncError
from torchrl_ext.registry import engines
from torchrl_ext.rollout.client import InferenceClient
from torchrl_ext.rpc.discovery import connect, discover
from torchrl_ext.rpc.health import Health
from torchrl_ext.rpc.http import normalise_url
from torchrl_ext.rpc.pool import Pool
from torchrl_ext.rpc.router import RouterClient, engine_key
from torchrl_ext.serving.processes import GuardedProcess
from torchrl_ext.serving.router import RouterProcess
from torchrl_ext.serving.topology import check_pools
from torchrl_ext.types import EngineInfo, EngineRow, SyncReport

__all__ = ["MemberChanges", "Routing"]

log = logging.getLogger("torchrl_ext")

_ABORT_TIMEOUT_S = 10.0
_PARTY = "update"


@dataclass(frozen=True, kw_only=True)
class MemberChanges:
    """The changes to a router's engines after one report.

    Attributes:
        added, removed: addresses of engines that joined or left the router.
        problems: failed changes as (address, reason); the next report retries them.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    problems: tuple[tuple[str, str], ...] = ()


class Routing:
    """Puts a model's engines behind a router and takes unwell ones out; a context manager.

    An engine is out while `Health` has a complaint about it. `follow` complains, as ``"update"``, about engines that an
    update lost or left behind. An engine that is taken out while paused ends its requests with the tokens that they
    have, and clients (see `client`) continue them on another engine.

    Args:
        engines: descriptions of engines (`torchrl_ext.discover`); prefill and decode engines make two pools. An empty
            sequence starts an empty router for engines that `adopt` adds.
        name: the job's name for the model.
        update_weights: whether the model follows the trainer; if not, `fleet` raises.
        router: base address of a running router; None starts one, which `close` ends.
        max_lag: how many versions an engine may be behind the newest that any engine serves.
        api_key: bearer token; of several keys, requests use the first and control calls the one that is accepted.
        health: records which engines are well; None creates one.
        settings: for the router that is started, see `RouterProcess`.

    Attributes:
        router: the client of the router.

    Raises:
        ConfigError: one router cannot serve these engines, or the router cannot take them.
        EngineError, DeadlineError: an engine or the router does not answer.
    """

    def __init__(
        self,
        engines: Sequence[EngineInfo],
        *,
        name: str = "default",
        update_weights: bool = True,
        router: str | None = None,
        max_lag: int = 0,
        api_key: str | tuple[str, ...] | None = None,
        health: Health | None = None,
        **settings: Any,
    ) -> None:
        _check(engines)
        if router is not None and settings:
            raise ConfigError(
                f"{', '.join(settings)} applies to routers that the job starts, but {router} already runs"
            )
        self.name, self.update_weights, self.health = name, update_weights, health or Health()
        infos = [replace(info, url=normalise_url(info.url)) for info in engines]
        self._engines = {info.url: info for info in infos}
        self._max_lag, self.api_key, self._settings = max_lag, api_key, settings
        self._changing, self._deaf = threading.RLock(), False
        self._process = self._started(self._engines) if router is None else None
        self.router = RouterClient(router or self._process.url, api_key=api_key)  # type: ignore[union-attr]
        for url in self._engines if router is not None else ():
            self._add(url)
        self.health.subscribe(self._heard)
        if any(self.health.why(url) for url in self._engines):  # complaints from before the subscription
            self._settle()

    @classmethod
    def over(cls, *addresses: str, api_key: str | tuple[str, ...] | None = None, **settings: Any) -> Routing:
        """Discover the engines at ``addresses`` and put them behind a router.

        Raises:
            ConfigError, EngineError, DeadlineError: as for `torchrl_ext.discover` and the class.
        """
        return cls(discover(*addresses, api_key=api_key), api_key=api_key, **settings)

    @property
    def url(self) -> str:
        """The router's base address."""
        return self.router.url

    @property
    def engines(self) -> tuple[EngineInfo, ...]:
        """All engines of this routing, in service or not."""
        return tuple(self._engines.values())

    def client(self, **settings: Any) -> InferenceClient:
        """Return a client for requests through the router; it retries until its deadline if the router fails.

        Args:
            settings: further arguments of `InferenceClient`; ``max_concurrency`` counts the requests to all engines
                together, by default 64 per engine.

        Raises:
            ConfigError: the routing has no engine.
        """
        if not self._engines:
            raise ConfigError(f"no engine is registered at router {self.url}")
        defaults = {"max_concurrency": 64 * len(self._engines), "api_key": self.api_key, "persistent": True}
        return InferenceClient(self.url, kind=self.engines[0].kind, **{**defaults, **settings})

    def fleet(self, **settings: Any) -> Pool:
        """Return a client for `WeightSender` and for control of every engine; it follows `adopt` and `release`.

        Args:
            settings: as for `torchrl_ext.connect`; ``api_key`` defaults to the routing's.

        Raises:
            ConfigError: the model does not follow the trainer, or the routing has no engine.
            EngineError, DeadlineError: as for `torchrl_ext.connect`.
        """
        if not self.update_weights:
            raise ConfigError(
                f"model {self.name!r} does not follow the trainer",
                state="its engines keep the weights that they were started with",
                hint="set update_weights: true for it",
            )
        members = partial(tuple, self._engines)
        return connect(*self._engines, **{"api_key": self.api_key, "members": members, **settings})

    def adopt(self, info: EngineInfo) -> None:
        """Add an engine; it gets requests once a report shows that it has the others' weights.

        Raises:
            ConfigError: one router cannot serve this engine together with the others.
        """
        _check([*self.engines, info])
        url = normalise_url(info.url)
        self.health.fail(url, EngineError(f"no update has reached {url} yet"), by=_PARTY)
        self._engines[url] = replace(info, url=url)

    def release(self, url: str) -> None:
        """Take an engine out of the router, and of `fleet` before its next update; do nothing for an unknown one.

        Raises:
            ConfigError: the router has prefill and decode pools, which are given when it starts.
            EngineError, DeadlineError: the router does not answer; the engine stays.
        """
        url = normalise_url(url)
        if self._pools:
            raise ConfigError(f"{self.url} has prefill and decode pools, from which no engine can be released")
        with self._changing:
            if url in self._engines:
                self.router.remove(url)
                del self._engines[url]
                self.health.forget(url)

    def following(self, update: Callable[..., SyncReport]) -> Callable[..., SyncReport]:
        """Wrap ``update`` (such as ``sender.update_weights``) to pass its report, or its error's, to `follow`."""

        @functools.wraps(update)
        def updating(*args: Any, **more: Any) -> SyncReport:
            try:
                report = update(*args, **more)
            except UpdateError as error:
                if error.report is not None:
                    self.follow(error.report)
                raise
            self.follow(report)
            return report

        return updating

    def follow(self, report: SyncReport) -> MemberChanges:
        """Make the router use exactly the well engines that serve the newest weights.

        The newest weights are the newest that any engine serves, so an update that reached no engine changes nothing.
        Engines that the report does not mention are taken out, unless the report has rows whose names match no engine
        of this router (`torchrl_ext.rpc.router.engine_key`): then they stay and are listed as problems. An engine or a
        router that does not answer raises nothing; the log and the result name it.

        A router with prefill and decode pools takes no changes. We restart our own at its address with the engines to
        use; a given one stays as it is.
        """
        rows, strange = self._rows_of_ours(report)
        newest = max((row.version or 0 for row in report.engines if row.state == "serving"), default=0)
        unclear = {}
        with self._changing:
            before, self._deaf = self._deaf, True  # the router is changed in one go
            try:
                for url in self._engines:
                    row = rows.get(url)
                    if row is None and strange:
                        unclear[url] = f"it is not in the report, which has {', '.join(strange)}"
                        log.warning("%s is unchanged at router %s: %s", url, self.url, unclear[url])
                    elif row is not None and row.state == "serving" and (row.version or 0) >= newest - self._max_lag:
                        self.health.mend(url, by=_PARTY)
                    else:
                        why = "no report" if row is None else row.error or f"version {row.version}"
                        self.health.fail(url, EngineError(why), by=_PARTY)
            finally:
                self._deaf = before
            changes = self._settle()
        for url in changes.removed:
            if url in rows and rows[url].state == "paused":
                self._end_requests(url)
        return replace(changes, problems=(*unclear.items(), *changes.problems))

    def close(self) -> None:
        """End our own router; leave a given one running. May be called twice."""
        with self._changing:
            self._deaf = True
            if self._process is not None:
                self._process.stop()
                self._process = None  # a late report starts no new router

    def __enter__(self) -> Routing:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def _pools(self) -> bool:
        return any(info.worker_type in ("prefill", "decode") for info in self._engines.values())

    def _started(self, urls: Iterable[str], **more: Any) -> GuardedProcess:
        """Start a router and return it once it lists these engines."""
        routed, settings = list(urls), {**self._settings, **more}
        pools: dict[str, list[Any]] = {"regular": [], "prefill": [], "decode": []}
        for url in routed:
            port = _bootstrap_port(self._engines[url])
            pools[self._engines[url].worker_type].append(url if port is None else (url, port))
        if routed:
            kind = self._engines[routed[0]].kind
            settings = {"kind": kind, "health_route": None if self.api_key else _probe(kind), **settings}
        process = RouterProcess(pools["regular"], prefill=pools["prefill"], decode=pools["decode"], **settings)
        try:
            RouterClient(process.url, api_key=self.api_key).expect(routed)
        except BaseException:
            process.stop()
            raise
        return process

    def _heard(self, url: str, why: Exception | None) -> None:
        """Take an unwell engine out, or a well one back in; raise EngineError if the router does not take it back."""
        # pools: the router itself skips engines that do not answer; no lock: another routing's report may wait for us
        if url not in self._engines or self._pools:
            return
        with self._changing:
            problems = {} if self._deaf else dict(self._settle().problems)
        problem = problems.get(url) or problems.get(self.url)
        if problem and why is None:
            raise EngineError(
                f"{url} is healthy, but its router did not add it again: {problem}",
                state="it gets no requests",
                hint="the next check of the engine, or the next report, asks the router again",
            )

    def _settle(self) -> MemberChanges:
        """Make the router use the engines without complaints; restart our own router if it has ended."""
        well = [url for url in self._engines if self.health.why(url) is None]
        if self._process is not None and not self._process.alive():
            log.warning("router %s has ended and is started again", self.url)
            return self._restarted(well, MemberChanges())
        try:
            keys = {engine_key(worker.url) for worker in self.router.workers()}
        except (EngineError, DeadlineError) as error:
            log.warning("router %s lists no workers: %s", self.url, error)
            return MemberChanges(problems=((self.url, str(error)),))
        used = [url for url in self._engines if engine_key(url) in keys]
        out, back = ([url for url in mine if url not in others] for mine, others in ((used, well), (well, used)))
        if self._pools and (out or back):
            if self._process is not None and {"prefill", "decode"} <= {self._engines[url].worker_type for url in well}:
                return self._restarted(well, MemberChanges(added=tuple(back), removed=tuple(out)))
            why = "the router keeps its pools, because the job did not start it or a pool would be empty"
            log.warning("%s: %s", self.url, why)
            return MemberChanges(problems=tuple((url, why) for url in (*out, *back)))
        problems: dict[str, str] = {}
        for url in (*out, *back):
            try:
                if url in out:
                    log.warning("%s gets no requests: %s", url, self.health.why(url))
                    self.router.remove(url)
                else:
                    self._add(url)
            except WeightSyncError as error:
                log.warning("router %s and %s: %s", self.url, url, error)
                problems[url] = str(error)
        added, removed = (tuple(url for url in urls if url not in problems) for urls in (back, out))
        return MemberChanges(added=added, removed=removed, problems=tuple(problems.items()))

    def _restarted(self, members: Sequence[str], changes: MemberChanges) -> MemberChanges:
        """Restart our router with ``members`` at its address; return ``changes`` if that works."""
        try:
            self._process.stop()  # type: ignore[union-attr]
            self._process = self._started(members, port=urlsplit(self.url).port)
        except WeightSyncError as error:
            log.error("router %s is down: %s", self.url, error)
            return MemberChanges(problems=((self.url, f"it is down; the next report tries it again: {error}"),))
        log.warning("router %s was started again", self.url)
        return changes

    def _rows_of_ours(self, report: SyncReport) -> tuple[dict[str, EngineRow], list[str]]:
        """Map our URLs to report rows; also return the names of unknown engines."""
        ours = {engine_key(url): url for url in self._engines}
        rows, strange = {}, []
        for row in report.engines:
            try:
                rows[ours[engine_key(row.engine)]] = row
            except (KeyError, ConfigError):  # another router's engine, or a name that is not an address
                strange.append(row.engine)
        return rows, strange

    def _add(self, url: str) -> None:
        info = self._engines[url]
        self.router.add(url, info.worker_type, bootstrap_port=_bootstrap_port(info))

    def _end_requests(self, url: str) -> None:
        """Abort a paused engine's requests, so that clients continue them on other engines."""
        limits = {"timeout_s": _ABORT_TIMEOUT_S, "load_timeout_s": _ABORT_TIMEOUT_S}
        engine = engines.make(self._engines[url].kind, url=url, api_key=self.api_key, pause_mode="abort", **limits)
        try:
            engine.pause()
        except (EngineError, DeadlineError) as error:
            log.warning("requests that run on %s are lost: %s", url, error)
        finally:
            engine.close()


def _probe(kind: str) -> str | None:
    """Return the route that a router checks: a paused engine may hang on ``/health``, the router's default (None)."""
    return engines.part(kind, "server").probe if kind in engines.having("server") else None


def _bootstrap_port(info: EngineInfo) -> int | None:
    """Return the bootstrap port that SGLang's router needs; None for vLLM, whose connector passes it on."""
    bootstraps = info.worker_type == "prefill" and engines.part(info.kind, "router").bootstraps
    return info.bootstrap_port if bootstraps else None


def _check(infos: Sequence[EngineInfo]) -> None:
    if len({engines.part(info.kind, "dialect") for info in infos}) > 1:
        kinds = ", ".join(sorted({info.kind for info in infos}))
        raise ConfigError(
            f"{kinds} need different request formats",
            expected="engines of one kind behind a router",
            hint="without a router, tx.connect(...) updates and InferenceClient.connect(...) asks engines of any kinds",
        )
    check_pools("a router", {info.worker_type for info in infos})
