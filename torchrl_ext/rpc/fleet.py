"""Many engines as one client: parallel fan-out, a rank offset for each, a row for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import ClassVar

from torchrl_ext.errors import ConfigError, EngineError
from torchrl_ext.rpc.client import EngineClient, _nothing
from torchrl_ext.types import EngineInfo, EngineRow, Info

__all__ = ["Fleet"]


class Fleet(EngineClient):
    """Fans every call out to its engines in parallel.

    An engine that fails a step of an update takes no further part in it and stays paused; the others finish the
    version. `commit` then raises, with a row per engine.

    Args:
        engines: the clients, at least one; their order decides rank offsets 1, 1 + w0, 1 + w0 + w1, ...

    Raises:
        ConfigError: no engine, or one address twice.
    """

    kind: ClassVar[str] = "fleet"

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        urls = [engine.url for engine in engines]
        twice = sorted({url for url in urls if urls.count(url) > 1})
        if not engines or twice:
            raise ConfigError(f"engine {twice[0]} is listed twice" if twice else "a fleet needs at least one engine")
        self.engines = tuple(engines)
        self._failed: dict[EngineClient, Exception] = {}

    @property
    def url(self) -> str:
        return ", ".join(engine.url for engine in self.engines)

    def infos(self) -> list[EngineInfo]:
        """`info` of each engine, in order."""
        return self._everywhere(self.engines, lambda engine: engine.info())

    def info(self) -> EngineInfo:
        infos = self.infos()
        common = set(infos[0].transports).intersection(*(info.transports for info in infos))
        return replace(
            infos[0],
            url=self.url,
            kind=self.kind,
            num_gpus=sum(info.num_gpus for info in infos),
            world_size=sum(info.world_size for info in infos),
            weight_version=max((info.weight_version for info in infos), key=_number),
            transports=tuple(sorted(common)),
        )

    def connect(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        self._failed.clear()
        offset, offsets = info.get("rank_offset", 1), {}
        for engine, described in zip(self.engines, self.infos(), strict=True):
            offsets[engine] = offset
            offset += described.world_size
        self._everywhere(
            self.engines, lambda engine: engine.connect({**info, "rank_offset": offsets[engine]}), on_failure
        )

    def prefetch(self, version: int) -> None:
        self._failed.clear()
        self._while_any("prefetch", lambda engine: engine.prefetch(version))

    def begin(self, version: int) -> None:
        self._while_any("pause", lambda engine: engine.begin(version))

    def load(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        self._while_any("load", lambda engine: engine.load(info), on_failure)

    def commit(self, version: int) -> None:
        self._while_any("commit", lambda engine: engine.commit(version))
        if self._failed:
            self._raise(f"{len(self._failed)} of {len(self.engines)} engines did not take version {version}")

    def pause(self) -> None:
        self._everywhere(self.engines, lambda engine: engine.pause())

    def resume(self) -> None:
        self._everywhere(self.engines, lambda engine: engine.resume())

    def rows(self) -> tuple[EngineRow, ...]:
        rows = []
        for engine in self.engines:
            (row,) = engine.rows()
            error = self._failed.get(engine)
            rows.append(row if error is None else replace(row, error=str(error)))
        return tuple(rows)

    def close(self) -> None:
        self._everywhere(self.engines, lambda engine: engine.close())

    def _while_any(
        self, step: str, call: Callable[[EngineClient], object], on_failure: Callable[[], None] = _nothing
    ) -> None:
        """One step of an update on the engines that are still part of it; raises when none is left."""
        active = [engine for engine in self.engines if engine not in self._failed]
        self._fan_out(active, call, on_failure)
        if len(self._failed) == len(self.engines):
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

    def _everywhere(
        self,
        engines: Sequence[EngineClient],
        call: Callable[[EngineClient], object],
        on_failure: Callable[[], None] = _nothing,
    ) -> list:
        """A call that must succeed on every engine."""
        self._failed.clear()
        results = self._fan_out(engines, call, on_failure)
        if self._failed:
            failed, self._failed = self._failed, {}
            if len(self.engines) == 1:
                raise next(iter(failed.values()))
            lines = "; ".join(f"{engine.url}: {error}" for engine, error in failed.items())
            raise EngineError(f"{len(failed)} of {len(engines)} engines failed: {lines}")
        return [results[engine] for engine in engines]

    def _raise(self, what: str) -> None:
        lines = "; ".join(f"{engine.url}: {error}" for engine, error in self._failed.items())
        raise EngineError(
            f"{what}: {lines}",
            rows=self.rows(),
            state="engines named here take no requests until an update reaches them; the others serve the new version",
            hint="mend the cause and call update_weights again, or take the engine out of the fleet",
        )


def _number(weight_version: str) -> int:
    return int(weight_version) if weight_version.isdecimal() else 0
