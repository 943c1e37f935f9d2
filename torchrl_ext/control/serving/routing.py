"""`Routing` keeps a router limited to engines that serve the newest weights."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torchrl_ext.base.errors import ConfigError, DeadlineError, EngineError, UpdateError
from torchrl_ext.base.registry import engines as kinds
from torchrl_ext.base.reports import EngineRow, SyncReport
from torchrl_ext.base.types import EngineInfo
from torchrl_ext.control.discovery import connect, discover
from torchrl_ext.control.fleet import Fleet
from torchrl_ext.control.http import Keys, normalise_url
from torchrl_ext.control.requests.client import InferenceClient
from torchrl_ext.control.serving.processes import GuardedProcess
from torchrl_ext.control.serving.router import RouterClient, engine_key
from torchrl_ext.control.serving.server import RouterProcess

__all__ = ["Routing"]

log = logging.getLogger("torchrl_ext")

_ABORT_S = {"timeout_s": 10.0, "load_timeout_s": 10.0}


class Routing:
    """Puts a model's engines behind a router, and takes those out that an update left behind; a context manager.

    An engine that is taken out while paused ends its requests with the tokens that they have, and clients (see
    `client`) continue them on another engine. A router with prefill and decode pools keeps its engines.

    Args:
        engines: descriptions of engines (`torchrl_ext.discover`); prefill and decode engines make two pools. An empty
            sequence starts an empty router.
        name: the job's name for the model.
        update_weights: whether the model follows the trainer; if not, `fleet` raises.
        router: base address of a running router, which lists the engines of its pools already; None starts one, which
            `close` ends.
        api_key: bearer token; of several keys, requests use the first and control calls the one that is accepted.
        settings: for the router that is started, see `RouterProcess`.

    Attributes:
        router: the client of the router.
        url: the router's base address.

    Raises:
        ConfigError: one router cannot serve these engines.
        EngineError, DeadlineError: an engine or the router does not answer, or the router does not list an engine.
    """

    _process: GuardedProcess | None = None

    def __init__(
        self,
        engines: Sequence[EngineInfo],
        *,
        name: str = "default",
        update_weights: bool = True,
        router: str | None = None,
        api_key: Keys = None,
        **settings: Any,
    ) -> None:
        if len({kinds.part(info.kind, "dialect") for info in engines}) > 1:
            raise ConfigError(
                f"{', '.join(sorted({info.kind for info in engines}))} need different request formats",
                expected="engines of one kind behind a router",
                hint="without a router, tx.connect and InferenceClient.connect update and ask engines of any kinds",
            )
        if router is not None and settings:
            raise ConfigError(
                f"{', '.join(settings)} applies to routers that the job starts, but {router} already runs"
            )
        self.name, self.update_weights, self.api_key = name, update_weights, api_key
        self.engines = tuple(replace(info, url=normalise_url(info.url)) for info in engines)
        self.url = normalise_url(self._start(settings) if router is None else router)
        self.router = RouterClient(self.url, api_key=api_key)
        try:
            for info in self.engines if router is not None else ():
                if info.worker_type == "regular":
                    self.router.add(info.url)
            self.router.expect([info.url for info in self.engines])
        except BaseException:
            self.close()
            raise

    @classmethod
    def over(cls, *addresses: str, api_key: Keys = None, **settings: Any) -> Routing:
        """Discover the engines at ``addresses`` and put them behind a router; raises as `torchrl_ext.discover` does."""
        return cls(discover(*addresses, api_key=api_key), api_key=api_key, **settings)

    def client(self, **settings: Any) -> InferenceClient:
        """Return a client for requests through the router; it retries until its deadline if the router fails.

        Args:
            settings: further arguments of `InferenceClient`; ``max_concurrency`` counts the requests to all engines
                together, by default 64 per engine.

        Raises:
            ConfigError: the routing has no engine.
        """
        if not self.engines:
            raise ConfigError(f"no engine is registered at router {self.url}")
        defaults = {"max_concurrency": 64 * len(self.engines), "api_key": self.api_key, "persistent": True}
        return InferenceClient(self.url, kind=self.engines[0].kind, **{**defaults, **settings})

    def fleet(self, **settings: Any) -> Fleet:
        """Return a client for `WeightSender` and for control of every engine.

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
        return connect(*(info.url for info in self.engines), **{"api_key": self.api_key, **settings})

    def following(self, update: Callable[..., SyncReport]) -> Callable[..., SyncReport]:
        """Wrap ``update`` (such as ``sender.update_weights``) to pass its report, or its error's, to `follow`."""

        @functools.wraps(update)
        def updating(*args: Any, **more: Any) -> SyncReport:
            try:
                report = update(*args, **more)
            except UpdateError as error:
                if error.report is not None:
                    try:
                        self.follow(error.report)
                    except (EngineError, DeadlineError) as other:  # the failed update says more
                        log.warning("%s", other)
                raise
            self.follow(report)
            return report

        return updating

    def follow(self, report: SyncReport) -> None:
        """Make the router use the engines that serve the newest version of the report's run that any engine serves.

        Versions of another run, and labels of unknown origin, never count as new, whatever their numbers. A report in
        which no engine serves a version of its run changes nothing. Rows of other routings' engines are ignored.

        Raises:
            ConfigError: no row of the report is about an engine of this routing.
            EngineError, DeadlineError: the router does not answer, or does not take or release an engine.
        """
        rows: dict[Any, EngineRow] = {}
        for row in report.engines:
            with suppress(ConfigError):  # an object or an actor has no address
                rows[engine_key(row.engine)] = row
        ours = {engine_key(info.url): info for info in self.engines}
        if not ours.keys() & rows.keys():
            raise ConfigError(
                f"the report is about {', '.join(row.engine for row in report.engines) or 'no engine'}",
                expected=f"engines of router {self.url}: {', '.join(info.url for info in self.engines)}",
                state="the router is unchanged",
            )
        serving = [row for row in report.engines if row.state == "serving" and row.run == report.run]
        newest = max((row.version for row in serving if row.version is not None), default=None)
        if newest is None:
            log.warning("router %s is unchanged: no engine serves a version of this run", self.url)
            return
        fit = {key for key, row in rows.items() if row in serving and row.version == newest}
        used = set(map(engine_key, self.router.workers()))
        changed = (ours.keys() & used) ^ (ours.keys() & fit)
        for key in sorted(changed, key=fit.__contains__):  # those with older weights leave first
            info, known = ours[key], rows.get(key)
            if info.worker_type != "regular":
                log.warning("router %s keeps its prefill and decode pools, although %s changed", self.url, info.url)
            elif key in fit:
                self.router.add(info.url)
            else:
                why = known.error or f"{known.state} at version {known.version}" if known else "it is not in a report"
                log.warning("%s gets no requests: %s", info.url, why)
                self.router.remove(info.url)
                if known and known.state == "paused":
                    self._end_requests(info)

    def close(self) -> None:
        """End our own router; leave a given one running. May be called twice."""
        if self._process is not None:
            self._process.stop()

    def __enter__(self) -> Routing:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _start(self, settings: dict[str, Any]) -> str:
        pools: dict[str, list[Any]] = {"regular": [], "prefill": [], "decode": []}
        for info in self.engines:
            port = info.bootstrap_port
            pools[info.worker_type].append(info.url if port is None else (info.url, port))
        if self.engines:
            kind = self.engines[0].kind
            settings = {"kind": kind, **settings}
            if not self.api_key and kind in kinds.having("server"):
                settings.setdefault("health_route", kinds.part(kind, "server").probe)
        self._process = RouterProcess(pools["regular"], prefill=pools["prefill"], decode=pools["decode"], **settings)
        return self._process.url

    def _end_requests(self, info: EngineInfo) -> None:
        """Abort a paused engine's requests, so that clients continue them on other engines."""
        engine = kinds.make(info.kind, url=info.url, api_key=self.api_key, pause_mode="abort", **_ABORT_S)
        try:
            engine.pause()
        except (EngineError, DeadlineError) as error:
            log.warning("requests that run on %s are lost: %s", info.url, error)
        finally:
            engine.close()
