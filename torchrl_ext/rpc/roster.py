"""`Roster`: which engines should take part in a pool's next update."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, final

from torchrl_ext.deadline import Deadline, in_thread
from torchrl_ext.errors import ConfigError, why
from torchrl_ext.rpc.client import EngineClient

__all__ = ["Roster", "Source"]

log = logging.getLogger("torchrl_ext")

Engine = EngineClient | str
Source = Callable[[], Iterable[Engine]]
"""Returns the addresses (or clients) of the engines that should take part in the next update."""

_Urls = tuple[str, ...]


@final
class Roster:
    """The groups of engines that should take part in a pool's updates; any thread may change them.

    `settle` makes the changes effective. An engine that is new has to answer first; until then each `settle` tries it
    again. If the source, or a new engine, raises or does not answer, nothing else changes, and the first such error is
    logged. A source adds what it lists anew and removes what it no longer lists, so an engine that it never listed
    stays, and one that `remove` took out stays out until the source has dropped it and lists it again.

    Args:
        engines: the first engines, which need not answer.
        group: how many consecutive engines are added and removed together.
        make: takes an address, and returns a client for the engine, which has answered.
        source: called by each `settle`; None if there is none.

    Raises:
        ConfigError: the engines do not form whole groups, or one is repeated.
    """

    def __init__(
        self,
        engines: Iterable[EngineClient],
        group: int,
        make: Callable[[str], EngineClient],
        source: Source | None,
    ) -> None:
        self._group, self.make, self._source = group, make, source
        self._changing, self._settling = threading.Lock(), threading.Lock()
        self._wanted: dict[_Urls, tuple[Engine, ...]] = self._grouped(engines)
        self._here: dict[_Urls, tuple[Engine, ...]] = dict(self._wanted)  # the same tuple: these are members
        self._listed: dict[_Urls, tuple[Engine, ...]] = {}
        self._jobs: dict[object, Future[Any]] = {}
        self._problems: dict[object, str] = {}

    def __reduce__(self) -> tuple[type[Roster], tuple[Any, ...]]:
        return Roster, (self.here(), self._group, self.make, self._source)  # a copy begins with who is here

    def add(self, *engines: Engine) -> None:
        """Want these engines, in whole groups; do nothing for a group that is already wanted.

        Raises:
            ConfigError: an address is invalid, or the engines do not form whole groups; nothing has changed.
        """
        self._change((), self._grouped(engines))

    def remove(self, *engines: Engine) -> None:
        """Want these engines no longer, in whole groups; do nothing for an engine that is not wanted.

        Raises:
            ConfigError: only a part of a group is named; nothing has changed.
        """
        with self._changing:
            known = {url for urls in self._wanted for url in urls}
            named = {_name(one) if isinstance(one, EngineClient) or one not in known else one for one in engines}
            groups = [urls for urls in self._wanted if named.intersection(urls)]
            for urls in groups:
                if not named.issuperset(urls):
                    raise ConfigError(
                        f"only a part of the deployment {', '.join(urls)} is named",
                        expected="all its servers",
                        state="the fleet is unchanged",
                    )
            for urls in groups:
                del self._wanted[urls]

    def yield_to_source(self) -> None:
        """Count the engines that are wanted now as listed by the source, so that it can remove them."""
        self._listed = dict(self._wanted)

    def settle(self, timeout_s: float) -> tuple[EngineClient, ...]:
        """Ask the source, meet new engines, and return the engines that take part from now on, in order of arrival.

        Args:
            timeout_s: deadline of both together, in seconds; later answers count next time.
        """
        within = Deadline(timeout_s)
        with self._settling:
            wanted = self._ask_source(within)
            new = [engines for urls, engines in wanted.items() if self._here.get(urls) is not engines]
            met = self._asked({engines: partial(self._meet, engines) for engines in new}, within)
            with self._changing:
                here = {}
                for urls, engines in self._wanted.items():
                    if engines in met or self._here.get(urls) is engines:
                        here[urls] = self._wanted[urls] = met.get(engines, engines)
                self._here = here
        return self.here()

    def wanted(self, timeout_s: float) -> list[Engine]:
        """Ask the source, and return the engines that should take part, whether they have answered or not."""
        with self._settling:
            return [one for engines in self._ask_source(Deadline(timeout_s)).values() for one in engines]

    def _ask_source(self, within: Deadline) -> dict[_Urls, tuple[Engine, ...]]:
        """Change what is wanted as the source says, if there is one, and return it."""
        source = self._source
        if source is not None:
            for listed in self._asked({source: lambda: self._grouped(source())}, within).values():
                new = {urls: engines for urls, engines in listed.items() if urls not in self._listed}
                try:
                    self._change(self._listed.keys() - listed.keys(), new)
                    self._listed = listed
                except ConfigError as error:
                    self._note(source, error)
        with self._changing:
            return dict(self._wanted)

    def here(self) -> tuple[EngineClient, ...]:
        """Return the engines that take part, in order of arrival."""
        return tuple(one for engines in self._here.values() for one in engines if isinstance(one, EngineClient))

    def problems(self) -> str:
        """Return why the source and wanted engines are missing; "" if none is."""
        return "; ".join(self._problems.values())

    def _change(self, gone: Iterable[_Urls], new: Mapping[_Urls, tuple[Engine, ...]]) -> None:
        with self._changing:
            wanted = {urls: engines for urls, engines in self._wanted.items() if urls not in gone}
            for urls, engines in new.items():
                if urls not in wanted and any(url in known for known in wanted for url in urls):
                    raise ConfigError(
                        f"the deployment {', '.join(urls)} shares a server with another one of the fleet",
                        state="the fleet is unchanged",
                        hint="remove the other deployment first",
                    )
                wanted.setdefault(urls, engines)
            self._wanted = wanted

    def _grouped(self, engines: Iterable[Engine]) -> dict[_Urls, tuple[Engine, ...]]:
        engines = tuple(engines)
        urls, size = [*map(_name, engines)], self._group
        twice = sorted({url for url in urls if urls.count(url) > 1})
        if twice:
            raise ConfigError(f"engine {twice[0]} is listed twice")
        if size < 1 or len(engines) % size:
            raise ConfigError(
                f"{len(engines)} engines with data_parallel_size={size}",
                expected="whole groups of data_parallel_size engines",
            )
        return {tuple(urls[i : i + size]): engines[i : i + size] for i in range(0, len(engines), size)}

    def _meet(self, engines: tuple[Engine, ...]) -> tuple[EngineClient, ...]:
        clients = tuple(one if isinstance(one, EngineClient) else self.make(one) for one in engines)
        for made, given in zip(clients, engines, strict=True):
            if made is given:
                made.info()
        return clients

    def _asked(self, calls: Mapping[Any, Callable[[], Any]], within: Deadline) -> dict[Any, Any]:
        """Make the calls concurrently, and return the results that are there in time, by key."""
        begun = []
        for key, call in calls.items():
            job = self._jobs.get(key)
            if job is None or (job.done() and job.exception() is not None):  # failed since it was last waited for
                self._jobs[key] = in_thread(call, "torchrl-ext-members")
                begun.append(self._jobs[key])
        wait(begun, within.left_s)  # nobody waits twice for the same answer
        found = {}
        for key in calls:
            job = self._jobs[key]
            error = job.exception() if job.done() else within.error(f"{_called(key)} did not answer")
            if error is not None:
                self._note(key, error)
            else:
                found[key] = self._jobs.pop(key).result()
                self._problems.pop(key, None)
        return found

    def _note(self, key: Any, error: BaseException) -> None:
        if key not in self._problems:
            log.warning("%s changes nothing yet, and is tried again before each update: %s", _called(key), why(error))
        self._problems[key] = f"{_called(key)}: {why(error)}"


def _name(engine: Engine) -> str:
    if isinstance(engine, EngineClient):
        return engine.url
    from torchrl_ext.rpc.http import normalise_url  # engines import this module, and need no HTTP client

    return normalise_url(engine)


def _called(key: Any) -> str:
    return ", ".join(map(_name, key)) if isinstance(key, tuple) else "the source of members"
