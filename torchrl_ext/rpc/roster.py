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
_Group = tuple[Engine, ...]
_SOURCE: _Group = ()  # stands for the source among the groups that are asked


@final
class Roster:
    """The groups of engines that should take part in a pool's updates; any thread may change them.

    `settle` makes the changes effective. It asks the source, adds what it lists anew, and removes what it no longer
    lists. An engine that is new has to answer first, and is asked again by each `settle` until it does.

    Args:
        engines: the first engines, which need not answer.
        group: how many consecutive engines come and go together.
        make: takes an address, and returns a client for the engine.
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
        self._group, self._make, self._source = group, make, source
        self._changing, self._settling = threading.Lock(), threading.Lock()
        self._wanted = self._grouped(engines)  # replaced by each change, so that it can be read without the lock
        self._here = list(self._wanted.values())  # those that take part
        self._listed: dict[_Urls, _Group] = {}
        self._jobs: dict[_Group, Future[Any]] = {}
        self._problems: dict[str, str] = {}

    def __reduce__(self) -> tuple[type[Roster], tuple[Any, ...]]:
        return Roster, (self.here(), self._group, self._make, self._source)  # a copy begins with who is here

    def here(self) -> tuple[EngineClient, ...]:
        """Return the engines that take part, in order of arrival."""
        return tuple(one for group in self._here for one in group if isinstance(one, EngineClient))

    def problems(self) -> str:
        """Return why the source and wanted engines are missing; "" if none is."""
        return "; ".join(f"{name}: {problem}" for name, problem in self._problems.items())

    def add(self, *engines: Engine) -> None:
        """See `Pool.add`."""
        self._change((), self._grouped(engines))

    def remove(self, *engines: Engine) -> None:
        """See `Pool.remove`."""
        wanted = self._wanted
        known = {url for urls in wanted for url in urls}
        named = {one if one in known else _name(one) for one in engines}
        gone = [urls for urls in wanted if named.intersection(urls)]
        for urls in gone:
            if not named.issuperset(urls):
                raise ConfigError(f"only a part of the deployment {', '.join(urls)} is named")
        self._change(gone, {})

    def settle(self, timeout_s: float) -> tuple[EngineClient, ...]:
        """Ask the source, meet new engines, and return the engines that take part from now on.

        Args:
            timeout_s: deadline of both together, in seconds; later answers count next time.
        """
        within = Deadline(timeout_s)
        with self._settling:
            before, self._problems = self._problems, {}
            if self._source is not None:
                self._asked({_SOURCE: partial(self._follow, self._source)}, within)
            here: set[_Group] = set(self._here)
            new = [group for group in self._wanted.values() if group not in here]
            met = self._asked({group: partial(self._meet, group) for group in new}, within)
            here.update(met.values())
            with self._changing:
                self._wanted = {urls: met.get(group, group) for urls, group in self._wanted.items()}
                self._here = [group for group in self._wanted.values() if group in here]
            for name, problem in self._problems.items():
                if name not in before:
                    log.warning("%s changes nothing yet, and is tried again before each update: %s", name, problem)
            return self.here()

    def _follow(self, source: Source) -> None:
        listed = self._grouped(source())
        new = {urls: group for urls, group in listed.items() if urls not in self._listed}
        self._change(self._listed.keys() - listed.keys(), new)
        self._listed = listed

    def _meet(self, group: _Group) -> tuple[EngineClient, ...]:
        clients = tuple(self._make(one) if isinstance(one, str) else one for one in group)
        for client in clients:
            client.info()
        return clients

    def _asked(self, calls: Mapping[_Group, Callable[[], Any]], within: Deadline) -> dict[_Group, Any]:
        """Make the calls concurrently, and return the results that are there in time; note why others are not."""
        begun = []
        for group, call in calls.items():
            job = self._jobs.get(group)
            if job is None or (job.done() and job.exception() is not None):  # failed since it was last waited for
                self._jobs[group] = in_thread(call, "torchrl-ext-members")
                begun.append(self._jobs[group])
        wait(begun, within.left_s)  # nobody waits twice for the same answer
        found = {}
        for group in calls:
            name, job = ", ".join(map(_name, group)) or "the source of members", self._jobs[group]
            error = job.exception() if job.done() else within.error(f"{name} did not answer")
            if error is None:
                found[group] = self._jobs.pop(group).result()
            else:
                self._problems[name] = why(error)
        return found

    def _change(self, gone: Iterable[_Urls], new: Mapping[_Urls, _Group]) -> None:
        with self._changing:
            wanted = {urls: group for urls, group in self._wanted.items() if urls not in gone}
            for urls, group in new.items():
                if urls not in wanted and any(url in known for known in wanted for url in urls):
                    raise ConfigError(f"the deployment {', '.join(urls)} shares a server with another one of the fleet")
                wanted.setdefault(urls, group)
            self._wanted = wanted

    def _grouped(self, engines: Iterable[Engine]) -> dict[_Urls, _Group]:
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


def _name(engine: Engine) -> str:
    if isinstance(engine, EngineClient):
        return engine.url
    from torchrl_ext.rpc.http import normalise_url  # engines import this module, and need no HTTP client

    return normalise_url(engine)
