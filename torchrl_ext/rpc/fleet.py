"""A client that drives many engines as one: calls in parallel, a rank offset and a row of the report for each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import Any, ClassVar

from torchrl_ext.deadline import in_thread
from torchrl_ext.errors import ConfigError, EngineError, why
from torchrl_ext.rpc.client import EngineClient, _nothing
from torchrl_ext.types import EngineInfo, EngineRow, Info, Part, least

__all__ = ["Fleet"]

log = logging.getLogger("torchrl_ext")

_PROBE_S = 2.0  # how long an update waits for an engine that was lost before


class Fleet(EngineClient):
    """Fans every call out to its engines in parallel.

    An engine that fails a step of an update takes no further part in it and stays paused; the others finish the
    version. `commit` then raises, with a row per engine. One that does not answer at all is lost: the others go on
    without it, its row says so, and it is back in the first update before which it answers again.

    Args:
        engines: the clients, at least one; their order decides rank offsets 1, 1 + w0, 1 + w0 + w1, ... Another fleet
            stands for its members.
        data_parallel_size: how many engines in a row are servers of one deployment. Each of them reports the workers
            of all, so they share one offset and count once.

    Raises:
        ConfigError: no engine, one address twice, or engines that are not in groups of ``data_parallel_size``.
    """

    kind: ClassVar[str] = "fleet"
    engines: tuple[EngineClient, ...]
    _group: int

    def __init__(self, engines: Sequence[EngineClient], *, data_parallel_size: int = 1) -> None:
        grouped = {engine._group for engine in engines if isinstance(engine, Fleet)} - {1, data_parallel_size}
        engines = [one for engine in engines for one in (engine.engines if isinstance(engine, Fleet) else (engine,))]
        urls = [engine.url for engine in engines]
        twice = sorted({url for url in urls if urls.count(url) > 1})
        if not engines or twice:
            raise ConfigError(f"engine {twice[0]} is listed twice" if twice else "a fleet needs at least one engine")
        if data_parallel_size < 1 or len(engines) % data_parallel_size or grouped:
            raise ConfigError(
                f"{len(engines)} engines with data_parallel_size={data_parallel_size}",
                expected="whole groups of data_parallel_size engines",
            )
        self.engines = tuple(engines)
        self._group = data_parallel_size
        self._met = False
        self._lost: dict[EngineClient, Exception] = {}
        self._told: set[EngineClient] = set()  # failures that an error has named since the engine last served
        self._failed: dict[EngineClient, Exception] = {}  # in this update
        self._probes: dict[EngineClient, Future[EngineInfo]] = {}
        self._decoding: set[EngineClient] = set()

    @property
    def url(self) -> str:
        return ", ".join(engine.url for engine in self.engines)

    def members(self) -> tuple[str, ...]:
        """Return the addresses that take part in the next update; ask engines that failed or were lost if they answer.

        Raises:
            EngineError: none answers.
        """
        suspects = [
            engine for engine in self.engines if not self._met or engine in self._failed or engine in self._lost
        ]
        answers = self._probe(suspects)
        silent = {engine: answer for engine, answer in answers.items() if isinstance(answer, Exception)}
        if len(silent) == len(self.engines) == 1:
            raise silent[self.engines[0]]
        if len(silent) == len(self.engines):
            self._failed = silent
            self._raise("no engine of the fleet answers")
        self._met = True
        for engine, answer in answers.items():
            if isinstance(answer, Exception):
                self._lose({engine: answer})
            elif self._lost.pop(engine, None) is not None:
                log.warning("engine %s is back", engine.url)
        self._failed.clear()
        self._told &= self._lost.keys()
        return tuple(engine.url for engine in self._active())

    def infos(self) -> list[EngineInfo]:
        """Return the `info` of each member, in order."""
        return self.everywhere("describe themselves", lambda engine: engine.info())

    def info(self) -> EngineInfo:
        infos = self.infos()
        common = set(infos[0].transports).intersection(*(info.transports for info in infos))
        return replace(
            infos[0],
            url=self.url,
            kind=self.kind,
            num_gpus=sum(info.num_gpus for info in infos),
            world_size=sum(workers for _, workers in self._deployments(infos)),
            weight_version=max((info.weight_version for info in infos), key=_number),
            transports=tuple(sorted(common)),
        )

    @property
    def verifies(self) -> bool:
        return all(engine.verifies for engine in self._active())

    @property
    def proof(self) -> str:
        return least(engine.proof for engine in self._active())

    @property
    def rehearsed(self) -> tuple[Info, ...]:
        return tuple(told for engine in self._active() for told in engine.rehearsed)

    def rehearse(self, how: str = "once") -> None:
        self.everywhere("rehearse an update", lambda engine: engine.rehearse(how))

    def connect(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        offset, offsets = info.get("rank_offset", 1), {}
        active, infos = self._active(), self.infos()
        self._decoding.update(engine for engine, one in zip(active, infos, strict=True) if one.worker_type == "decode")
        for members, workers in self._deployments(infos):
            offsets.update(dict.fromkeys(members, offset))
            offset += workers
        self.everywhere(
            "join the transport", lambda one: one.connect({**info, "rank_offset": offsets[one]}), on_failure
        )

    def _deployments(self, infos: Sequence[EngineInfo]) -> list[tuple[list[EngineClient], int]]:
        """Return the engines that are not lost by deployment, in order, each with the number of its workers."""
        places = {engine: place // self._group for place, engine in enumerate(self.engines)}
        found: dict[int, tuple[list[EngineClient], int]] = {}
        for engine, described in zip(self._active(), infos, strict=True):
            members, workers = found.get(places[engine], ([], 0))
            found[places[engine]] = ([*members, engine], max(workers, described.world_size))
        return list(found.values())

    def replaced(self, connection: str) -> str:
        return next(filter(None, self.everywhere("say who has joined", lambda one: one.replaced(connection))), "")

    def prefetch(self, version: int, part: Part | None = None) -> None:
        self._failed.clear()
        self._while_any("prefetch", lambda engine: engine.prefetch(version, part))

    def begin(self, version: int) -> None:
        self._while_any("pause", lambda engine: engine.begin(version))

    def load(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        self._while_any("load", lambda engine: engine.load(info), on_failure)

    def _compare(self, digests: Mapping[str, str]) -> None:
        self._while_any("load", lambda engine: engine.verify(digests))

    def commit(self, version: int) -> None:
        """See `EngineClient.commit`. Engines that decode serve again last: by then those that prefill have dropped the
        keys and values of the old weights."""
        active = self._active()
        for engines in (set(active) - self._decoding, self._decoding.intersection(active)):
            self._while_any("commit", lambda engine: engine.commit(version), among=engines)
        missed = len(self._failed) + len(self._lost)
        if self._failed or self._lost.keys() - self._told:
            self._raise(f"{missed} of {len(self.engines)} engines did not take version {version}")

    def each(self) -> tuple[EngineClient, ...]:
        return tuple(self._active())

    def oldest(self, version: int) -> int | None:
        found = [engine.oldest(version) for engine in self._active()]
        known = [one for one in found if one is not None]
        return min(known) if known and len(known) == len(found) else None

    def adapter(self, name: str) -> Fleet:
        return Fleet([engine.adapter(name) for engine in self.engines])

    def unload(self) -> None:
        self.everywhere("unload", lambda engine: engine.unload())

    def pause(self) -> bool:
        """See `EngineClient.pause`. All pause or none: where one fails to, those that served before are resumed.

        Raises:
            EngineError: some engine did not pause; has a row per engine.
        """
        self._failed.clear()
        engines = self._active()
        served = self._fan_out(engines, lambda engine: engine.pause(), _nothing)
        if self._failed:
            unpaused, self._failed = self._failed, {}
            self._fan_out(
                [engine for engine in engines if served.get(engine)], lambda engine: engine.resume(), _nothing
            )
            still, self._failed = self._failed, {**self._failed, **unpaused}
            named = ", ".join(engine.url for engine in still)
            raise self._partly(
                f"{len(unpaused)} of {len(engines)} engines did not pause",
                state="the rows say who serves; those that served before were told to resume, and say that they do"
                + (f", but for {named}" if still else ""),
            )
        return any(served.values())

    def resume(self) -> None:
        self.everywhere("resume", lambda engine: engine.resume())

    def sleep(self, level: int = 1, tags: Collection[str] | None = None) -> None:
        self.everywhere("sleep", lambda engine: engine.sleep(level, tags))

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        self.everywhere("wake up", lambda engine: engine.wake_up(tags))

    def rows(self) -> tuple[EngineRow, ...]:
        rows = []
        for engine in self.engines:
            (row,) = engine.rows()
            if engine in self._lost:
                row = replace(row, state="unreachable")
            error = self._failed.get(engine) or self._lost.get(engine)
            rows.append(row if error is None else replace(row, error=str(error)))
        return tuple(rows)

    def look(self) -> tuple[EngineRow, ...]:
        self.everywhere("say how they are", lambda engine: engine.look())
        return self.rows()

    def close(self) -> None:
        self.everywhere("close", lambda engine: engine.close())

    def everywhere(
        self, what: str, call: Callable[[Any], object], on_failure: Callable[[], None] = _nothing
    ) -> list[Any]:
        """Call ``call`` for each engine that is not lost, all at the same time, and return the results in order.

        Args:
            what: names the call, for the error.
            call: with each engine's client.
            on_failure: called as soon as one of them fails.

        Raises:
            EngineError: some engine did not; has a row per engine. A fleet of one raises that engine's own error.
        """
        self._failed.clear()
        engines = self._active()
        results = self._fan_out(engines, call, on_failure)
        if self._failed:
            raise self._partly(f"{len(self._failed)} of {len(engines)} engines did not {what}")
        return [results[engine] for engine in engines]

    def _lose(self, errors: Mapping[EngineClient, Exception]) -> None:
        """Go on without engines that do not answer, until they do."""
        for engine, error in errors.items():
            if engine not in self._lost:
                log.warning("engine %s is lost: %s", engine.url, error)
            self._lost[engine] = error

    def _active(self) -> list[EngineClient]:
        return [engine for engine in self.engines if engine not in self._lost]

    def _probe(self, engines: Sequence[EngineClient]) -> dict[EngineClient, EngineInfo | Exception]:
        """Return the `info` of each engine, or the error in its place. A lost one gets little time; an answer that
        comes later counts the next time."""
        answers: dict[EngineClient, EngineInfo | Exception] = {}
        for engine in engines:
            if engine not in self._probes:
                self._probes[engine] = in_thread(engine.info, f"probe {engine.url}")
        until = time.monotonic() + _PROBE_S
        for engine in engines:
            known = self._lost.get(engine)
            try:
                answers[engine] = self._probes[engine].result(
                    None if known is None else max(0, until - time.monotonic())
                )
            except FutureTimeout:
                answers[engine] = known or EngineError(f"{engine.url} does not answer")
                continue
            except Exception as error:  # noqa: BLE001 - whatever it is, it belongs in this engine's row
                answers[engine] = error
            del self._probes[engine]
        return answers

    def _while_any(
        self,
        step: str,
        call: Callable[[EngineClient], object],
        on_failure: Callable[[], None] = _nothing,
        among: Collection[EngineClient] | None = None,
    ) -> None:
        """Take one step of an update on the engines that are still part of it; raise when none is left."""
        active = self._active()
        wanted = [engine for engine in active if engine not in self._failed and (among is None or engine in among)]
        self._fan_out(wanted, call, on_failure)
        self._told.update(self._failed)  # whatever error ends this update, the rows with it name them
        if len(self._failed) == len(active):
            self._raise(f"every engine failed to {step}")

    def _fan_out(
        self, engines: Sequence[EngineClient], call: Callable[[EngineClient], object], on_failure: Callable[[], None]
    ) -> dict[EngineClient, object]:
        results = {}
        with ThreadPoolExecutor(max_workers=max(1, len(engines)), thread_name_prefix="fleet") as pool:
            futures = {pool.submit(call, engine): engine for engine in engines}
            for future in as_completed(futures):
                engine = futures[future]
                try:
                    results[engine] = future.result()
                except Exception as error:  # noqa: BLE001 - whatever it is, it belongs in this engine's row
                    self._failed[engine] = error
                    on_failure()
        return results

    def _partly(self, what: str, state: str = "the rows say what holds; the others did as they were told") -> Exception:
        """Return the error to raise where a call failed on some members; of a single engine, its own error."""
        if len(self.engines) == 1:
            return next(iter(self._failed.values()))
        return EngineError(f"{_causes(self._failed)}; {what}", rows=self.rows(), state=state)

    def _raise(self, what: str) -> None:
        missed = {**self._lost, **self._failed}
        self._told.update(missed)
        if len(self.engines) == 1:
            raise missed[self.engines[0]]
        raise EngineError(
            f"{_causes(missed)}; {what}",
            rows=self.rows(),
            state="the rows say whether these engines serve an older version, are paused, or do not answer"
            + ("; the others serve the new one" if len(missed) < len(self.engines) else ""),
            hint="mend the cause and call update_weights again: engines that answer then take part",
        )


def _causes(errors: Mapping[EngineClient, Exception]) -> str:
    """Return the words of each error, and of which engine it is where these do not say so."""
    words = {engine.url: why(error) for engine, error in errors.items()}
    return "; ".join(cause if url in cause else f"{cause} ({url})" for url, cause in words.items())


def _number(weight_version: str) -> int:
    return int(weight_version) if weight_version.isdecimal() else 0
