"""The embedded engine over HTTP: its routes are vLLM's, and one of its own: to score tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torchrl_ext.rpc.client import EngineClient, _nothing
from torchrl_ext.rpc.engines.logprobs import logprobs_of_embedded
from torchrl_ext.rpc.engines.sleep import Rest
from torchrl_ext.rpc.engines.vllm import VLLMEngine
from torchrl_ext.rpc.http import HTTPSession
from torchrl_ext.rpc.router import refuse_router
from torchrl_ext.types import EngineInfo, EngineRow, Info

__all__ = ["EmbeddedEngine"]


class EmbeddedEngine(EngineClient):
    """The engine of `torchrl_ext.embedded` in another process.

    Args:
        url: its base address.
        settings: as for `VLLMEngine`.
    """

    kind: ClassVar[str] = "embedded"

    def __init__(self, url: str, **settings: Any) -> None:
        self._client = VLLMEngine(url, **settings)
        self._http = HTTPSession(
            url,
            timeout_s=settings.get("load_timeout_s", 600.0),
            api_key=settings.get("api_key"),
            check=refuse_router,
        )

    @property
    def url(self) -> str:
        return self._client.url

    def info(self) -> EngineInfo:
        return self._client.info()

    def connect(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        self._client.connect(info, on_failure)

    @property
    def proof(self) -> str:
        return self._client.proof

    @property
    def rehearsed(self) -> tuple[Info, ...]:
        return self._client.rehearsed

    def rehearse(self, how: str = "once") -> None:
        self._client.rehearse(how)

    def prefetch(self, version: int) -> None:
        self._client.prefetch(version)

    def begin(self, version: int) -> None:
        self._client.begin(version)

    def load(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        self._client.load(info, on_failure)

    def commit(self, version: int) -> None:
        self._client.commit(version)

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `EngineClient.logprobs`. A paused engine answers too, unless what it holds cannot be served."""
        if not prompts:
            return []
        told = self._http.post("/prompt_logprobs", {"prompts": [list(prompt) for prompt in prompts]})
        return logprobs_of_embedded(self.url, prompts, told)

    def rest(self) -> Rest:
        """What the engine says of its pause and its sleep."""
        return self._client.rest()

    def pause(self) -> bool:
        return self._client.pause()

    def resume(self) -> None:
        self._client.resume()

    def sleep(self, level: int = 1, tags: Collection[str] | None = None) -> None:
        self._client.sleep(level, tags)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        self._client.wake_up(tags)

    def rows(self) -> tuple[EngineRow, ...]:
        return tuple(replace(row, kind=self.kind) for row in self._client.rows())

    def look(self) -> tuple[EngineRow, ...]:
        return tuple(replace(row, kind=self.kind) for row in self._client.look())

    def close(self) -> None:
        self._http.close()
        self._client.close()
