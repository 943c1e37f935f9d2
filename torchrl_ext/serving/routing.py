"""`Routing`: keep a router up to date, so that it sends requests only to engines that serve the newest weights."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from torchrl_ext.compat.skyrl import RemoteInferenceClient
from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, UpdateError, WeightSyncError
from torchrl_ext.registry import engines
from torchrl_ext.rpc.discovery import connect, discover
from torchrl_ext.rpc.fleet import Fleet
from torchrl_ext.rpc.http import normalise_url
from torchrl_ext.rpc.router import RouterClient, engine_key
from torchrl_ext.serving.router import RouterProcess
from torchrl_ext.serving.topology import check_pools
from torchrl_ext.types import EngineInfo, EngineRow, SyncReport

__all__ = ["MemberChanges", "Routing"]

log = logging.getLogger("torchrl_ext")

_ABORT_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class MemberChanges:
    """The changes to a router's engines that one report led to.

    Attributes:
        added, removed: addresses of engines that the router was told of.
        problems: changes that failed, as pairs of address and reason; tried again with the next report.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    problems: tuple[tuple[str, str], ...] = ()


class Routing:
    """Puts the engines of a model behind a router, and keeps those out that failed or fell behind; a context manager.

    An engine that is taken out while it is paused ends its requests with the tokens they have, so that a
    `RemoteInferenceClient` continues them on another engine. It comes back with the first report that shows it with the
    weights of the others.

    Args:
        engines: descriptions of engines (`torchrl_ext.discover`); prefill and decode engines make two pools. With none,
            the router starts empty, for engines that `adopt` adds.
        name: the job's name of the model.
        update_weights: whether the model follows the trainer; of one that does not, `fleet` refuses.
        router: base address of a router that runs already; None starts one, which ends with `close`.
        max_lag: versions that an engine may be behind the newest that any engine serves.
        api_key: sent as a bearer token; of several, the first with requests, and whichever is accepted for control.
        settings: for the router that is started, see `RouterProcess`.

    Attributes:
        router: the client of the router.

    Raises:
        ConfigError: engines that one router cannot serve, or a router that cannot take them.
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
        **settings: Any,
    ) -> None:
        _check(engines)
        if router is not None and settings:
            raise ConfigError(f"{', '.join(settings)} is for a router of ours, and {router} runs already")
        self.name, self.update_weights = name, update_weights
        self._engines = {normalise_url(info.url): info for info in engines}
        self._max_lag, self.api_key, self._settings = max_lag, api_key, settings
        self._process: RouterProcess | None = None
        if router is None:
            self._process = self._started(list(self._engines))
            router = self._process.url
        self.router = RouterClient(router, api_key=api_key)
        try:
            for info in self._routed(list(self._engines)) if self._process is None else ():
                self._add(info)
        except BaseException:
            self.close()
            raise

    @classmethod
    def over(cls, *addresses: str, api_key: str | tuple[str, ...] | None = None, **settings: Any) -> Routing:
        """Put the engines at ``addresses``, whatever their kind, behind a router.

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
        """The engines that belong behind the router, whether they are in service now or not."""
        return tuple(self._engines.values())

    def client(self, **settings: Any) -> RemoteInferenceClient:
        """Return a client for requests through the router and for control of every engine.

        Args:
            settings: further fields of `RemoteInferenceClient`.

        Raises:
            ConfigError: there is no engine.
        """
        if not self._engines:
            raise ConfigError(f"there is no engine behind router {self.url}")
        kind = next(iter(self._engines.values())).kind
        return RemoteInferenceClient(
            proxy_url=self.url, server_urls=tuple(self._engines), kind=kind, api_key=self.api_key, **settings
        )

    def fleet(self, **settings: Any) -> Fleet:
        """Return a client for `WeightSender` and for control of every engine.

        Args:
            settings: as for `torchrl_ext.connect`; the key is the routing's where none is given.

        Raises:
            ConfigError: the model does not follow the trainer, or there is no engine.
            EngineError, DeadlineError: as for `torchrl_ext.connect`.
        """
        if not self.update_weights:
            raise ConfigError(
                f"model {self.name!r} does not follow the trainer",
                state="its engines keep the weights that they were started with",
                hint="set update_weights: true for it",
            )
        return connect(*self._engines, **{"api_key": self.api_key, **settings})

    def adopt(self, info: EngineInfo) -> None:
        """Add an engine to those of the router; it gets requests once a report shows it with the others' weights.

        Raises:
            ConfigError: one router cannot serve it together with the others.
        """
        _check([*self._engines.values(), info])
        self._engines[normalise_url(info.url)] = info

    def following(self, update: Callable[..., SyncReport]) -> Callable[..., SyncReport]:
        """Return ``update`` (such as ``sender.update_weights``) with `follow` after it, also where it fails."""

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
        """Make the router use the engines that serve the newest weights, and no others.

        The newest weights are the newest that any engine serves; so an update that reached no engine changes nothing.
        Engines that the report does not mention are taken out, unless it has rows that belong to no engine of this
        router as far as their names tell (`torchrl_ext.rpc.router.engine_key`): then they stay as they are, and are
        among the problems. Nothing is raised for an engine or a router that does not answer: it is in the log and in
        the result.
        """
        rows, strange = self._rows_of_ours(report)
        newest = max((row.version or 0 for row in report.engines if row.state == "serving"), default=0)
        oldest = newest - self._max_lag
        fit = {url for url, row in rows.items() if row.state == "serving" and (row.version or 0) >= oldest}
        unclear = [url for url in self._engines if strange and url not in rows]
        problems = [(url, f"it is not in the report, which has {', '.join(strange)}") for url in unclear]
        for url, problem in problems:
            log.warning("%s stays as it is behind router %s: %s", url, self.url, problem)
        if self._process is not None and not self._process.alive():
            return self._revived([*fit, *unclear], problems)
        try:
            listed = self._listed()
        except (EngineError, DeadlineError) as error:
            log.warning("router %s does not say whom it uses: %s", self.url, error)
            return MemberChanges(problems=(*problems, (self.url, str(error))))
        out = [url for url in self._engines if url in listed - fit and url not in unclear]
        back = [url for url in self._engines if url in fit - listed]
        changes = self._rebuilt(listed, out, back) if self._pools else self._changed(out, back)
        for url in out:
            row = rows.get(url)
            why = "no report" if row is None else row.error or f"version {row.version}"
            log.warning("%s gets no requests: %s", url, why)
            if row is not None and row.state == "paused":
                self._end_requests(url)
        return replace(changes, problems=(*problems, *changes.problems))

    def withdraw(self, url: str) -> MemberChanges:
        """Make the router send no more requests to an engine that is known to be broken, until `follow` or `restore`.

        A router with pools is left as it is: it leaves out by itself the engines that do not answer.
        """
        return MemberChanges() if self._pools else self._changed([normalise_url(url)], [])

    def restore(self, url: str) -> MemberChanges:
        """Make the router send requests again to an engine whose weights are known to be right."""
        return MemberChanges() if self._pools else self._changed([], [normalise_url(url)])

    def close(self) -> None:
        """End the router where it is ours; leave one that was given as it is. May be called twice."""
        if self._process is not None:
            self._process.stop()

    def __enter__(self) -> Routing:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def _pools(self) -> bool:
        return any(info.worker_type in ("prefill", "decode") for info in self._engines.values())

    def _routed(self, urls: Sequence[str]) -> list[EngineInfo]:
        """Return the engines that a router can take: all but encoders, which get requests from other engines."""
        return [self._engines[url] for url in urls if self._engines[url].worker_type != "encoder"]

    def _started(self, urls: Sequence[str], **more: Any) -> RouterProcess:
        """Start a router of ours, and return it once it lists these engines."""
        routed = self._routed(urls)
        pools: dict[str, list[Any]] = {"regular": [], "prefill": [], "decode": []}
        for info in routed:
            url = normalise_url(info.url)
            port = _meeting(info)
            pools[info.worker_type].append(url if port is None else (url, port))
        kind = next((info.kind for info in routed), "vllm")
        # SGLang's /health may generate a token, which never comes while it is paused; its /ping needs the API key
        health = "/ping" if kind == "sglang" and self.api_key is None else None
        settings = {"kind": kind, "health_route": health, **self._settings, **more}
        process = RouterProcess(pools["regular"], prefill=pools["prefill"], decode=pools["decode"], **settings)
        try:
            RouterClient(process.url, api_key=self.api_key).expect(normalise_url(info.url) for info in routed)
        except BaseException:
            process.stop()
            raise
        return process

    def _rows_of_ours(self, report: SyncReport) -> tuple[dict[str, EngineRow], list[str]]:
        """Return the report's rows of our engines, by our addresses of them, and the names in all other rows."""
        ours = {engine_key(url): url for url in self._engines}
        rows, strange = {}, []
        for row in report.engines:
            try:
                rows[ours[engine_key(row.engine)]] = row
            except (KeyError, ConfigError):  # an engine of another router, or a name that is no address
                strange.append(row.engine)
        return rows, strange

    def _listed(self) -> set[str]:
        """Return the engines that the router uses, by our addresses of them."""
        used = {engine_key(worker.url) for worker in self.router.workers()}
        return {url for url in self._engines if engine_key(url) in used}

    def _changed(self, out: Sequence[str], back: Sequence[str]) -> MemberChanges:
        added: list[str] = []
        removed: list[str] = []
        problems = []
        calls = [(url, removed, functools.partial(self.router.remove, url)) for url in out]
        calls += [(info.url, added, functools.partial(self._add, info)) for info in self._routed(back)]
        for url, changed, call in calls:
            try:
                call()
                changed.append(normalise_url(url))
            except WeightSyncError as error:
                log.warning("router %s and %s: %s", self.url, url, error)
                problems.append((normalise_url(url), str(error)))
        return MemberChanges(added=tuple(added), removed=tuple(removed), problems=tuple(problems))

    def _add(self, info: EngineInfo) -> None:
        self.router.add(info.url, info.worker_type, bootstrap_port=_meeting(info))

    def _rebuilt(self, listed: set[str], out: Sequence[str], back: Sequence[str]) -> MemberChanges:
        """Start a router with pools again with the changed engines, at the same port: it cannot be told of changes.

        Two routers cannot share a port: the new one is first tried at another port, and then replaces the old one.
        """
        if not out and not back:
            return MemberChanges()
        members = [url for url in self._engines if url in (listed | set(back)) - set(out)]
        if self._process is None:
            why = "has static pools"
        elif not {"prefill", "decode"} <= {info.worker_type for info in self._routed(members)}:
            why = "would have an empty pool"
        else:
            try:
                self._started(members, port=0).stop()
                self._start_again(members)
                return MemberChanges(added=tuple(back), removed=tuple(out))
            except WeightSyncError as error:
                why = f"could not be started anew: {error}"
        problems = [(url, f"the router {why}") for url in (*out, *back)]
        log.warning("router %s %s, and goes on with the engines that it has", self.url, why)
        if self._process is None or self._process.alive():
            return MemberChanges(problems=tuple(problems))
        again = self._revived([url for url in self._engines if url in listed], [])
        return MemberChanges(problems=(*problems, *again.problems))

    def _start_again(self, members: Sequence[str]) -> None:
        """End our router, and start it with ``members`` at its address."""
        self._process.stop()  # type: ignore[union-attr]
        self._process = self._started(members, port=urlsplit(self.url).port)

    def _revived(self, members: Sequence[str], problems: Sequence[tuple[str, str]]) -> MemberChanges:
        """Start our router again after it has ended by itself."""
        members = [url for url in self._engines if url in members]
        try:
            self._start_again(members)
        except WeightSyncError as error:
            log.error("router %s is down: %s", self.url, error)
            down = f"it is down, and is tried again with the next report: {error}"
            return MemberChanges(problems=(*problems, (self.url, down)))
        log.warning("router %s had ended, and is up again", self.url)
        removed = tuple(url for url in self._engines if url not in members)
        return MemberChanges(removed=removed, problems=tuple(problems))

    def _end_requests(self, url: str) -> None:
        """End the requests that a paused engine has in work, so that clients continue them on other engines."""
        limits = {"timeout_s": _ABORT_TIMEOUT_S, "load_timeout_s": _ABORT_TIMEOUT_S}
        engine = engines.make(self._engines[url].kind, url=url, api_key=self.api_key, pause_mode="abort", **limits)
        try:
            engine.pause()
        except (EngineError, DeadlineError) as error:
            log.warning("requests on %s are lost with it: %s", url, error)
        finally:
            engine.close()


def _meeting(info: EngineInfo) -> int | None:
    """Return the port that a router has to know: requests to pools of vLLM bring the connector's address themselves."""
    return info.bootstrap_port if info.kind != "vllm" and info.worker_type == "prefill" else None


def _check(infos: Sequence[EngineInfo]) -> None:
    if len({engines.part(info.kind, "dialect") for info in infos}) > 1:
        kinds = ", ".join(sorted({info.kind for info in infos}))
        raise ConfigError(f"{kinds} are asked in different dialects", expected="engines of one kind behind a router")
    check_pools("a router", {info.worker_type for info in infos})
