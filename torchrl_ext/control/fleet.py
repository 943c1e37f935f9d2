"""`Fleet`: one client for many engines, with parallel calls, rank offsets and a report row per engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, as_completed, wait
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NoReturn, final

from torchrl_ext.base.deadline import in_thread
from torchrl_ext.base.errors import ConfigError, DeadlineError, EngineError, code_of, why
from torchrl_ext.base.reports import EngineRow, least
from torchrl_ext.base.types import EngineInfo, Info, Part, label_number
from torchrl_ext.control.client import EngineClient, Manner, Update, nothing

__all__ = ["Fleet", "Members"]

log = logging.getLogger("torchrl_ext")

Members = Callable[[], Iterable[EngineClient | str]]
"""Returns the addresses (or clients) of the engines that should take part in the next update."""

_PROBE_S = 2.0  # how long an update waits for an engine that is already lost


class Fleet(EngineClient):
    """Drives a fleet of engines: every call goes to all of them concurrently.

    An engine that does not answer at all is lost: the others continue without it, and it rejoins at the first update
    before which it answers again.

    Args:
        engines: the clients, at least one unless there is ``members``; their order decides rank offsets 1, 1 + w0, 1 +
            w0 + w1, ... A nested fleet is replaced by its members.
        members: returns the addresses, or clients, of the engines that should take part; asked before each update. If
            it raises, nothing changes. An engine that is new takes part once it answers; a running update goes on with
            the engines that it began with.
        make: takes an address that ``members`` returned, and returns a client.

    Attributes:
        engines: the clients.

    Raises:
        ConfigError: no engine, or a repeated address.
    """

    kind: ClassVar[str] = "fleet"
    engines: tuple[EngineClient, ...]

    def __init__(
        self,
        engines: Sequence[EngineClient],
        *,
        members: Members | None = None,
        make: Callable[[str], EngineClient] | None = None,
    ) -> None:
        flat = _flat(engines)
        urls = [engine.url for engine in flat]
        if len({*urls}) < len(urls):
            raise ConfigError(f"engine {max(urls, key=urls.count)} is listed twice", hint="list each engine once")
        if not (flat or members):
            raise ConfigError("a fleet needs an engine", hint="list one at least, or give members=")
        self.engines = tuple(flat)
        self._source, self._make = members, make or _refused
        self._jobs: dict[str, Future[EngineClient]] = {}  # questions that are not answered yet, by address
        self._problems: dict[str, str] = {}  # why a wanted engine, or the function that lists them, is missing
        self._missing: dict[EngineClient, Exception] = {}  # lost engines, and why they are
        self._doubted = set(flat)  # the next `members` probes them
        self.reported: set[EngineClient] = set()  # engines that an error has already named since they last served

    @property
    def url(self) -> str:
        return ", ".join(engine.url for engine in self.engines) or "a fleet without engines"

    def reconcile(self, timeout_s: float) -> None:
        """Ask the function who takes part, as each update does; wait ``timeout_s`` seconds for new engines."""
        if self._source is None:
            return
        reported, self._problems = self._problems, {}
        known = {engine.url: engine for engine in self.engines}
        try:
            wanted = {_name(one): one for one in self._source()}
        except Exception as error:  # noqa: BLE001 - whoever it is that lists engines, the fleet goes on
            self._problems["the function that lists members"] = why(error)
            wanted = {**known}
        answers = self._asked({url: one for url, one in wanted.items() if url not in known}, timeout_s)
        for url in wanted.keys() - known.keys():
            found = answers.get(url) or DeadlineError("it has not answered yet")
            if isinstance(found, EngineClient):
                known[url] = found
            else:
                self._problems[url] = why(found)
        for name in self._problems.keys() - reported.keys():
            log.warning("%s changes nothing yet, and is tried again before each update: %s", name, self._problems[name])
        before, self.engines = self.engines, tuple(known[url] for url in wanted if url in known)
        for engine in set(before) - set(self.engines):
            log.warning("engine %s has left the fleet", engine.url)
            self._missing.pop(engine, None)
            self._jobs.pop(engine.url, None)
            self._doubted.discard(engine)
            in_thread(engine.close, f"close {engine.url}")

    def _asked(
        self, engines: Mapping[str, EngineClient | str], timeout_s: float | None
    ) -> dict[str, EngineClient | BaseException]:
        """Ask engines, by address, to describe themselves; return the clients, or the errors, of those that answered.

        One that is late is not asked again: its answer counts the next time.
        """

        def ask(one: EngineClient | str) -> EngineClient:
            client = self._make(one) if isinstance(one, str) else one
            client.info()
            return client

        jobs, found = {}, dict[str, EngineClient | BaseException]()
        for url, one in engines.items():  # another thread may ask at the same time
            job = self._jobs.get(url) or self._jobs.setdefault(url, in_thread(partial(ask, one), f"ask {url}"))
            jobs[url] = job
        wait(jobs.values(), timeout_s)
        for url, job in jobs.items():
            if job.done():
                found[url] = job.exception() or job.result()
                self._jobs.pop(url, None)
        return found

    def members(self) -> tuple[str, ...]:
        """Reconcile the fleet; probe failed and lost engines; return the addresses that take part in the next update.

        Raises:
            EngineError: there is no engine, or none answers.
        """
        self.reconcile(_PROBE_S)
        if not self.engines:
            raise self._nobody()
        lost, engines = self.lost(), self.engines
        suspects = [engine for engine in engines if engine in lost or engine in self._doubted]
        answers = self._asked({engine.url: engine for engine in suspects if engine not in lost}, None)
        answers |= self._asked({engine.url: engine for engine in suspects if engine in lost}, _PROBE_S)
        said = {engine: answers.get(engine.url, lost.get(engine)) for engine in suspects}
        silent = {engine: error for engine, error in said.items() if isinstance(error, Exception)}
        if len(silent) == len(engines):
            raise self.missed("no engine of the fleet answered", {**lost, **silent})
        self._doubted.difference_update(suspects)
        for engine in suspects:
            if engine in silent:
                self.lose(engine, silent[engine])
            elif engine in lost:
                log.warning("engine %s is back", engine.url)
                self._missing.pop(engine, None)
        self.reported &= self.lost().keys()
        return tuple(engine.url for engine in self.each())

    def doubt(self, engines: Iterable[EngineClient]) -> None:
        """Have the next `members` probe ``engines``, which failed a step."""
        self._doubted.update(engines)

    def lose(self, engine: EngineClient, error: Exception) -> None:
        """Continue without ``engine`` until it answers a probe of `members`."""
        if engine not in self.lost():
            log.warning("engine %s is lost: %s", engine.url, error)
        self._missing[engine] = error

    def infos(self) -> list[EngineInfo]:
        """Return the `info` of each member, in order."""
        return list(self._described().values())

    def _described(self) -> dict[EngineClient, EngineInfo]:
        return dict(self.everywhere("describe themselves", lambda engine: (engine, engine.info())))

    def info(self) -> EngineInfo:
        """See `EngineClient.info`; ``weight_version`` is the oldest among the members."""
        described = self._described()
        if not described:
            raise self._nobody()
        infos = list(described.values())
        common = set(infos[0].transports).intersection(*(info.transports for info in infos))
        return replace(
            infos[0],
            url=self.url,
            kind=self.kind,
            num_gpus=sum(info.num_gpus for info in infos),
            world_size=sum(info.world_size for info in infos),
            weight_version=min((info.weight_version for info in infos), key=_number),
            transports=tuple(sorted(common)),
        )

    @property
    def verifies(self) -> bool:
        return all(engine.verifies for engine in self.each())

    @property
    def rehearsed(self) -> tuple[Info, ...]:
        return tuple(report for engine in self.each() for report in engine.rehearsed)

    def rehearse(self, how: str = "once") -> str:
        return least(self.everywhere("rehearse an update", lambda engine: engine.rehearse(how)))

    def join(self, offer: Info, on_failure: Callable[[], None] = nothing) -> None:
        described, first, offsets = self._described(), offer.get("rank_offset", 1), {}
        for engine, one in described.items():
            offsets[engine] = first
            first += one.world_size
        self.everywhere(
            "join the transport", lambda one: one.join({**offer, "rank_offset": offsets[one]}), on_failure, offsets
        )

    def replaced(self, connection: str) -> str:
        return next(filter(None, self.everywhere("say who has joined", lambda one: one.replaced(connection))), "")

    def update(self, version: int, manner: Manner = Manner()) -> FleetUpdate:
        return FleetUpdate(self, version, manner)

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Ask the engine, if there is just one; see `EngineClient.logprobs`."""
        engines = self.each()
        return engines[0].logprobs(prompts) if len(engines) == 1 else super().logprobs(prompts)

    def each(self) -> tuple[EngineClient, ...]:
        lost = self.lost()
        return tuple(engine for engine in self.engines if engine not in lost)

    def load_adapter(self, name: str, path: str) -> None:
        """See `EngineClient.load_adapter`; an engine that does not answer is one that failed."""
        what = f"serve adapter {name!r} from {path}"
        self.everywhere(what, lambda engine: engine.load_adapter(name, path), among=self.engines)

    def unload_adapter(self, name: str) -> None:
        what = f"unload adapter {name!r}"
        self.everywhere(what, lambda engine: engine.unload_adapter(name), among=self.engines)

    def pause(self) -> bool:
        return any(self.everywhere("pause", lambda engine: engine.pause()))

    def resume(self) -> None:
        self.everywhere("resume", lambda engine: engine.resume())

    def sleep(self, level: int = 1, tags: Collection[str] | None = None) -> None:
        self.everywhere("sleep", lambda engine: engine.sleep(level, tags))

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        self.everywhere("wake up", lambda engine: engine.wake_up(tags))

    def look(self) -> tuple[EngineRow, ...]:
        looked = dict(self.everywhere("say how they are", lambda engine: (engine, *engine.look())))
        return tuple(looked[one] if one in looked else _row(one, self.lost().get(one)) for one in self.engines)

    def close(self) -> None:
        self.everywhere("close", lambda engine: engine.close())

    def everywhere(
        self,
        what: str,
        call: Callable[[Any], object],
        on_failure: Callable[[], None] = nothing,
        among: Collection[EngineClient] | None = None,
    ) -> list[Any]:
        """Run ``call`` with each engine that is not lost, concurrently, and return the results in order.

        Args:
            what: the call's name in the error: "2 of 3 engines did not ``what``".
            call: takes an engine's client.
            on_failure: called as soon as one engine fails.
            among: the engines to call, in place of those that are not lost now.

        Raises:
            EngineError: an engine failed; has a row per engine that did. A fleet of one raises that engine's own error.
        """
        engines = self.each() if among is None else among
        results, errors = _fan_out({engine: partial(call, engine) for engine in engines}, on_failure)
        if errors:
            raise self._error(
                errors,
                f"{len(errors)} of {len(engines)} engines did not {what}",
                "the other engines succeeded; error.rows lists the state of those that did not",
            )
        return [results[engine] for engine in engines]

    def lost(self) -> dict[EngineClient, Exception]:
        """Return the lost engines and why each is lost."""
        found = ((engine, self._missing.get(engine)) for engine in self.engines)
        return {engine: error for engine, error in found if error is not None}

    def _nobody(self) -> EngineError:
        return EngineError(
            "; ".join(["the fleet has no engine", *(f"{name}: {what}" for name, what in self._problems.items())]),
            state="nothing was sent",
            hint="have members= list an engine that answers",
        )

    def missed(
        self,
        what: str,
        missed: Mapping[EngineClient, Exception],
        rows: tuple[EngineRow, ...] = (),
        others: str = "the new one",
    ) -> Exception:
        """Return the error for engines that did not take a version, which the next update then probes."""
        self.reported.update(missed)
        return self._error(
            missed,
            what,
            "error.rows says whether these engines serve an older version, are paused, or do not answer"
            + (f"; the others serve {others}" if len(missed) < len(self.engines) else ""),
            "fix the cause and call update_weights again; it includes every engine that answers by then",
            rows,
        )

    def _error(
        self,
        errors: Mapping[EngineClient, Exception],
        what: str,
        state: str,
        hint: str | None = None,
        rows: tuple[EngineRow, ...] = (),
    ) -> Exception:
        """Return the error for a call that failed on some members; a fleet of one returns that engine's own error."""
        if len(self.engines) == 1:
            return next(iter(errors.values()))
        causes = {engine.url: why(error) for engine, error in errors.items()}
        words = "; ".join(cause if url in cause else f"{cause} ({url})" for url, cause in causes.items())
        code = next(filter(None, map(code_of, errors.values())), "")
        rows = rows or tuple(_row(*failed) for failed in errors.items())
        return EngineError(f"{words}; {what}", rows=rows, state=state, hint=hint, code=code)


@final
class FleetUpdate(Update):
    """Takes one version to each engine that takes part, concurrently.

    An engine that fails a step drops out; the others finish the version, and `commit` then raises an error with a row
    per engine. With policy ``"all"`` the first failure takes the version back from every engine, and raises.

    Args:
        fleet: the engines; those that it has now take part.
        version, manner: the version, and how it is taken.
    """

    def __init__(self, fleet: Fleet, version: int, manner: Manner) -> None:
        super().__init__(version)
        self._fleet, self._engines, self._lost, self._manner = fleet, fleet.engines, fleet.lost(), manner
        self._first: list[EngineClient] = []  # the one that commits, and is asked, before the others
        self._refused = False  # by the canary
        own = replace(manner, canary=self._canary)
        self._updates = {one: one.update(version, own) for one in fleet.each()}
        self._failed: dict[EngineClient, Exception] = {}

    def stage(self, part: Part | None = None) -> None:
        self._step("prefetch", lambda update: update.stage(part))
        found = (self._updates[engine].obstacle for engine in self._left())
        self.obstacle = next(filter(None, found), "")

    def begin(self) -> None:
        self._step("pause", lambda update: update.begin())

    def load(self, info: Info, on_failure: Callable[[], None] = nothing) -> None:
        self._step("load", lambda update: update.load(info), on_failure)

    def verify(self, digests: Mapping[str, str], digest: str = "") -> None:
        if digests or digest:
            self._step("load", lambda update: update.verify(digests, digest))

    def commit(self) -> tuple[EngineRow, ...]:
        """See `Update.commit`; raises EngineError, with a row per engine, if an engine failed or is lost."""
        left, tries = self._left(), self._manner.canary is not None and not self.obstacle
        while left and tries:
            self._first, left = left[:1], left[1:]
            tries = self._step("commit", lambda update: update.commit(), among=self._first)  # then the next one tries
            if self._refused:
                self._take_back("the first engine computes other outputs")
        self._step("commit", lambda update: update.commit(), among=left)
        if self._failed or not {*self._lost} <= self._fleet.reported:
            missed = {**self._lost, **self._failed}
            everyone = len(self._updates) + len(self._lost)
            what = f"{len(missed)} of {everyone} engines did not take version {self.version}"
            raise self._fleet.missed(what, missed, self.rows())
        return self.rows()

    def undo(self) -> None:
        """See `Update.undo`; also of engines that failed. Each engine that serves serves what it did before."""
        _, errors = _fan_out({engine: update.undo for engine, update in self._updates.items()})
        self._failed |= {engine: error for engine, error in errors.items() if engine not in self._failed}

    def keep(self) -> None:
        _fan_out({engine: self._updates[engine].keep for engine in self._left()})

    def rows(self) -> tuple[EngineRow, ...]:
        rows = {engine: _row(engine, error) for engine, error in self._lost.items()}
        for engine, update in self._updates.items():
            (row,) = update.rows()
            failed = self._failed.get(engine)
            rows[engine] = row if failed is None else replace(row, error=str(failed))
        return tuple(rows[engine] for engine in self._engines if engine in rows)

    def _canary(self, engine: EngineClient) -> None:
        if engine in self._first and self._manner.canary is not None:
            self._refused = True
            self._manner.canary(engine)
            self._refused = False

    def _left(self) -> list[EngineClient]:
        return [engine for engine in self._updates if engine not in self._failed]

    def _step(
        self,
        step: str,
        call: Callable[[Update], object],
        on_failure: Callable[[], None] = nothing,
        among: Sequence[EngineClient] | None = None,
    ) -> bool:
        """Take a step on the engines still in the update, or on those ``among`` them; return whether one failed.

        Raises:
            EngineError: every engine of the update has failed, or one has and the policy is ``"all"``.
        """
        engines = self._left() if among is None else among
        _, errors = _fan_out({engine: partial(call, self._updates[engine]) for engine in engines}, on_failure)
        self._failed.update(errors)
        self._fleet.doubt(errors)
        self._fleet.reported.update(errors)  # the error that ends the update has rows that name them
        if errors and self._manner.policy == "all":
            self._take_back(f"{len(errors)} of {len(self._updates)} engines failed to {step}")
        if len(self._failed) == len(self._updates):
            raise self._fleet.missed(f"every engine failed to {step}", {**self._lost, **self._failed}, self.rows())
        return bool(errors)

    def _take_back(self, why_so: str) -> NoReturn:
        self.undo()
        missed = {**self._lost, **self._failed}
        what = f"{why_so}, and version {self.version} was taken back"
        raise self._fleet.missed(what, missed, self.rows(), others="what they did before")


def _fan_out(
    calls: Mapping[EngineClient, Callable[[], object]], on_failure: Callable[[], None] = nothing
) -> tuple[dict[EngineClient, object], dict[EngineClient, Exception]]:
    """Make each engine's call, all concurrently; return the results and the errors."""
    jobs = {in_thread(call, f"drive {engine.url}"): engine for engine, call in calls.items()}
    results, errors = {}, {}
    for job in as_completed(jobs):
        try:
            results[jobs[job]] = job.result()
        except Exception as error:  # noqa: BLE001 - any error belongs in this engine's row
            errors[jobs[job]] = error
            on_failure()
    return results, errors


def _row(engine: EngineClient, error: Exception | None) -> EngineRow:
    """Return the row of an engine that failed with ``error``, as the error knows it, or that is lost."""
    for row in error.rows if isinstance(error, EngineError) else ():
        if row.engine == engine.url:
            return replace(row, error=str(error))
    why_not = None if error is None else str(error)
    return EngineRow(engine=engine.url, kind=engine.kind, state="unreachable", error=why_not)


def _flat(engines: Iterable[EngineClient]) -> list[EngineClient]:
    return [one for engine in engines for one in (engine.engines if isinstance(engine, Fleet) else (engine,))]


def _refused(address: str) -> EngineClient:
    raise ConfigError(
        f"this fleet cannot make a client for {address!r}",
        expected="a client",
        hint="get the fleet from torchrl_ext.connect",
    )


def _name(engine: EngineClient | str) -> str:
    if isinstance(engine, EngineClient):
        return engine.url
    from torchrl_ext.control.http import normalise_url  # fleets of other engines need no HTTP client

    return normalise_url(engine)


def _number(weight_version: str) -> int:
    return label_number(weight_version) or 0
