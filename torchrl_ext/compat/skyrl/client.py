"""`RemoteInferenceClient`: requests for tokens go through a router, control calls to every engine itself.

The split, the names and the shapes of inputs and outputs are those of SkyRL's client of that name (its "Inference
Architecture" page). Weight versions per token are added, and a generation that an engine aborted is continued.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torchrl_ext.compat.skyrl.tokens import TokenRequests
from torchrl_ext.compat.skyrl.updates import EngineUpdates
from torchrl_ext.errors import ConfigError
from torchrl_ext.rollout.requests import Requests, targets
from torchrl_ext.rpc.connections import Background, PerLoop, number_from
from torchrl_ext.rpc.discovery import connect
from torchrl_ext.rpc.fleet import Fleet

__all__ = ["RemoteInferenceClient"]

_T = TypeVar("_T")
_CONCURRENCY = "SKYRL_GENERATE_CONCURRENCY_PER_ENGINE"


@dataclass(frozen=True, kw_only=True)
class RemoteInferenceClient(TokenRequests, EngineUpdates):
    """Sends requests to a router and control calls to the engines behind it; can be sent to another process.

    Methods are coroutines, for any number of event loops; `run` calls them from code that has none.

    Attributes:
        proxy_url: base address of the router (or of the only engine): requests for tokens go there.
        server_urls: base address of every engine: control calls go there, and are refused where a router answers.
        kind: ``"vllm"``, ``"sglang"`` or ``"embedded"``.
        model_name: ``model`` of requests; None leaves it to the engine.
        adapter: name of the LoRA adapter to generate with (`AdapterSender`); None for the base weights.
        uses_lora_weight_sync: updates bring an adapter alone: a request then has to name a model, or `adapter` does,
            and a sleep keeps the base weights.
        enable_return_routed_experts: ask for the experts that each token was routed to; of vLLM servers only.
        data_parallel_size: how many of ``server_urls`` in a row are servers of one deployment.
        tokenizer: used for text in place of the engines' routes, where given.
        api_key: sent as a bearer token; see `HTTPSession` for several.
        concurrency_per_engine: most requests in work per engine, over all calls in one event loop; 0 for no limit.
            None takes ``SKYRL_GENERATE_CONCURRENCY_PER_ENGINE`` of the environment, or 512.
        timeout_s: deadline of a call for tokens, all its prompts together, in seconds.
        control_timeout_s: deadline of a control call, in seconds.

    Raises:
        ConfigError: addresses or numbers that cannot work.
    """

    proxy_url: str
    server_urls: Sequence[str]
    kind: str = "vllm"
    model_name: str | None = None
    adapter: str | None = None
    uses_lora_weight_sync: bool = False
    enable_return_routed_experts: bool = False
    data_parallel_size: int = 1
    tokenizer: Any = field(default=None, repr=False, compare=False)
    api_key: str | tuple[str, ...] | None = field(default=None, repr=False)
    concurrency_per_engine: int | None = None
    timeout_s: float = 1800.0
    control_timeout_s: float = 600.0
    _background: Background = field(init=False, repr=False, compare=False)
    _requests: PerLoop[Requests] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        servers = tuple(one.url for one in targets(self.server_urls, [self.kind] * len(self.server_urls)))
        limit = number_from(_CONCURRENCY, 512) if self.concurrency_per_engine is None else self.concurrency_per_engine
        if self.data_parallel_size < 1 or len(servers) % self.data_parallel_size or limit < 0:
            raise ConfigError(
                f"{len(servers)} servers, data_parallel_size={self.data_parallel_size}, concurrency_per_engine={limit}",
                expected="servers in groups of data_parallel_size, and a limit of at least 0",
            )
        (proxy,) = targets([self.proxy_url], [self.kind])
        if self.enable_return_routed_experts and self.kind != "vllm":
            raise ConfigError(f"routed experts are not read from {self.kind} engines", expected='kind="vllm"')
        limit = limit * len(servers) // self.data_parallel_size
        how: dict[str, Any] = {"limit": limit, "api_key": self.api_key, "persistent": True}
        found: dict[str, Any] = {"server_urls": servers, "proxy_url": proxy.url}
        found["_requests"] = PerLoop(functools.partial(Requests, [proxy], **how))
        found["_background"] = Background("inference-loop")
        for name, value in found.items():
            object.__setattr__(self, name, value)
        if len(servers) > 1 and self.proxy_url in servers:
            raise ConfigError(
                f"proxy_url {self.proxy_url} is one of {len(servers)} servers: the others would get no request",
                hint="put a router in front of them (torchrl_ext.serving.routing.Routing)",
            )

    def fleet(self, **settings: Any) -> Fleet:
        """Return a client for `WeightSender` that drives every engine through whole updates.

        Args:
            settings: as for `torchrl_ext.connect`.
        """
        dp_size = self.data_parallel_size
        return connect(*self.server_urls, api_key=self.api_key, data_parallel_size=dp_size, **settings)

    def get_endpoint_url(self) -> str:
        """Return the address that requests for tokens go to."""
        return self.proxy_url

    # running and closing

    def run(self, call: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        """Await ``call`` from code without an event loop: ``client.run(client.pause())``.

        Raises:
            DeadlineError: it took longer than ``timeout_s`` seconds.
            EngineError: the client was closed meanwhile.
        """
        return self._background.run(call, timeout_s)

    async def teardown(self) -> None:
        """Drop this event loop's connections, and what engines said of themselves; a later call begins anew."""
        self._keep(_sizes=None, _backends=None)
        await self._requests.close()

    aclose = teardown

    def close(self) -> None:
        """Close what `run` has opened; each `run` that waits ends with an error. May be called twice."""
        self._background.close(self.teardown())

    async def __aenter__(self) -> RemoteInferenceClient:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.teardown()

    def __reduce__(self) -> tuple[Any, ...]:
        given = {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.init}
        kept = {name: getattr(self, name) for name in ("_updates", "_sizes", "_base", "_fetched", "_loading")}
        return functools.partial(type(self), **given), (), kept

    # helpers

    @property
    def _engines(self) -> tuple[str, Sequence[str], dict[str, Any]]:
        return self.kind, self.server_urls, {"api_key": self.api_key, "load_timeout_s": self.control_timeout_s}

    @property
    def _keeps_base(self) -> bool:
        return self.uses_lora_weight_sync or self.adapter is not None
