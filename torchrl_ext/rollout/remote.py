"""`RemoteInferenceClient`: requests for tokens go through a router, control calls to every engine itself.

The split, the names and the shapes of inputs and outputs are those of SkyRL's client of that name (its "Inference
Architecture" page). Weight versions per token are added, and a generation that an engine aborted is continued.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torchrl_ext.errors import ConfigError
from torchrl_ext.rollout.completions import ChatContinuation, Continuation, TextContinuation
from torchrl_ext.rollout.control import EngineControl
from torchrl_ext.rollout.dialects import dialects
from torchrl_ext.rollout.generation import Generation, GenerationRequest, checked_prompt
from torchrl_ext.rollout.requests import Asked, Requests, targets
from torchrl_ext.rpc.connections import Background, PerLoop, each
from torchrl_ext.rpc.discovery import connect
from torchrl_ext.rpc.fleet import Fleet
from torchrl_ext.types import Info

__all__ = ["RemoteInferenceClient"]

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class RemoteInferenceClient(EngineControl):
    """Sends requests to a router and control calls to the engines behind it; can be sent to another process.

    Methods are coroutines, for any number of event loops; `run` calls them from code that has none.

    Attributes:
        proxy_url: base address of the router (or of the only engine): requests for tokens go there.
        server_urls: base address of every engine: control calls go there, and are refused where a router answers.
        kind: ``"vllm"``, ``"sglang"`` or ``"embedded"``.
        model_name: ``model`` of requests; None leaves it to the engine.
        adapter: name of the LoRA adapter to generate with (`AdapterSender`); None for the base weights.
        data_parallel_size: how many of ``server_urls`` are replicas of one engine.
        tokenizer: used for text in place of the engines' routes, where given.
        api_key: sent as a bearer token; see `HTTPSession` for several.
        concurrency_per_engine: most requests in work per engine, over all calls in one event loop; 0 for no limit.
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
    data_parallel_size: int = 1
    tokenizer: Any = field(default=None, repr=False, compare=False)
    api_key: str | tuple[str, ...] | None = field(default=None, repr=False)
    concurrency_per_engine: int = 512
    timeout_s: float = 1800.0
    control_timeout_s: float = 600.0
    _background: Background = field(init=False, repr=False, compare=False)
    _requests: PerLoop[Requests] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        servers = tuple(one.url for one in targets(self.server_urls, [self.kind] * len(self.server_urls)))
        if self.data_parallel_size < 1 or len(servers) % self.data_parallel_size or self.concurrency_per_engine < 0:
            raise ConfigError(
                f"{len(servers)} servers, data_parallel_size={self.data_parallel_size}, "
                f"concurrency_per_engine={self.concurrency_per_engine}",
                expected="servers in groups of data_parallel_size, and a limit of at least 0",
            )
        (proxy,) = targets([self.proxy_url], [self.kind])
        limit = self.concurrency_per_engine * len(servers) // self.data_parallel_size
        how: dict[str, Any] = {"limit": limit, "api_key": self.api_key, "persistent": True}
        found: dict[str, Any] = {"server_urls": servers, "proxy_url": proxy.url}
        found["_requests"] = PerLoop(functools.partial(Requests, [proxy], **how))
        found["_background"] = Background("inference-loop")
        for name, value in found.items():
            object.__setattr__(self, name, value)
        if len(servers) > 1 and self.proxy_url in servers:
            raise ConfigError(
                f"proxy_url {self.proxy_url} is one of {len(servers)} servers: the others would get no request",
                hint="put a router in front of them (torchrl_ext.rollout.routing.Routing)",
            )

    # tokens, through the router

    async def generate(self, input_batch: Mapping[str, Any], model: str | None = None) -> Info:
        """Continue prompts, each with a request of its own.

        Args:
            input_batch: ``prompt_token_ids`` (token ids per prompt), ``sampling_params`` (vLLM's names; ``n`` is 1),
                ``session_ids`` (one per prompt, or absent: prompts of one session stay on one engine), ``cache_salt``.
            model: takes the place of ``model_name``.

        Returns:
            Lists with one entry per prompt: ``responses`` (text; None without a tokenizer on either side),
            ``response_ids``, ``stop_reasons``, ``response_logprobs`` (None where none were asked for), and
            ``weight_versions`` (the number of the version that sampled each token; -1 where an engine does not say).

        Raises:
            ConfigError: no token ids, an empty prompt, or ``n`` above 1.
            EngineUnreachableError, EngineRefusedError, DeadlineError: a prompt got no answer in time.
        """
        prompts = input_batch.get("prompt_token_ids")
        if prompts is None:
            raise ConfigError("input_batch has no prompt_token_ids", hint="render or tokenize prompts first")
        sampling = dict(input_batch.get("sampling_params") or {})
        if sampling.pop("n", 1) != 1:
            raise ConfigError("generate makes one continuation per prompt", hint="repeat the prompt, or call sample")
        sessions = input_batch.get("session_ids") or [None] * len(prompts)
        if len(sessions) != len(prompts):
            raise ConfigError(f"{len(sessions)} session_ids for {len(prompts)} prompts", expected="one per prompt")
        requests = [_request(prompt, sampling, i) for i, prompt in enumerate(prompts)]
        found = await self._all(requests, sessions, model, cache_salt=input_batch.get("cache_salt"))
        texts = None
        if self.tokenizer is not None or self.kind != "embedded":
            texts = await self.detokenize([one.token_ids for one in found])
        return {
            "responses": texts,
            "response_ids": [list(one.token_ids) for one in found],
            "stop_reasons": [one.finish_reason for one in found],
            "response_logprobs": [list(one.logprobs) for one in found] if requests and requests[0].logprobs else None,
            "weight_versions": [one.token_versions() for one in found],
        }

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        *,
        num_samples: int = 1,
        sampling_params: Mapping[str, Any] | None = None,
        session_id: Any = None,
        model: str | None = None,
    ) -> list[Generation]:
        """Continue one prompt ``num_samples`` times; with a seed, continuation i is sampled with ``seed + i``.

        Raises:
            ConfigError, EngineUnreachableError, EngineRefusedError, DeadlineError: as for `generate`.
        """
        request = _request(prompt_token_ids, {"logprobs": 0, **(sampling_params or {})}, 0)
        requests = dataclasses.replace(request, n=num_samples).split()
        return await self._all(requests, [session_id] * num_samples, model)

    async def chat_completion(self, request_payload: Mapping[str, Any]) -> Info:
        """Ask for a chat completion, over ``/v1/chat/completions``.

        Args:
            request_payload: ``{"json": body}``; ``session_id`` in the body picks the engine and is taken out of it.

        Returns:
            The engine's answer. One that was aborted has been continued; or asked for again, where it has what no
            prompt can hold: thoughts, calls of tools, several choices.

        Raises:
            EngineUnreachableError, EngineRefusedError, DeadlineError: no answer in time.
        """
        return await self._completed("/v1/chat/completions", ChatContinuation, request_payload)

    async def completion(self, request_payload: Mapping[str, Any]) -> Info:
        """Ask for a text completion, over ``/v1/completions``; otherwise as `chat_completion`."""
        return await self._completed("/v1/completions", TextContinuation, request_payload)

    async def render(self, request_payload: Mapping[str, Any]) -> Any:
        """Return the token ids into which an engine turns a chat (``messages``) or a completion (``prompt``).

        Raises:
            ConfigError: SGLang has no such route.
            EngineUnreachableError, EngineRefusedError, DeadlineError: no answer in time.
        """
        if self.kind == "sglang":
            raise ConfigError("SGLang does not render chats", hint="give the client a tokenizer, and use its template")
        body, session_id = self._body(request_payload)
        kind = "chat/completions" if "messages" in body else "completions"
        return await self.post(f"/v1/{kind}/render", body, session_id=session_id)

    render_chat_completion = render

    async def tokenize(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text."""
        if self.tokenizer is not None:
            return [list(self.tokenizer(one, add_special_tokens=add_special_tokens)["input_ids"]) for one in texts]
        more = {"add_special_tokens": add_special_tokens, **self._model()}
        found = await each([self.post("/tokenize", {"prompt": one, **more}) for one in texts])
        return [told["tokens"] for told in found]

    async def detokenize(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each list of token ids."""
        if self.tokenizer is not None:
            return self.tokenizer.batch_decode([list(ids) for ids in token_ids], skip_special_tokens=True)
        more = self._model()
        found = await each([self.post("/detokenize", {"tokens": list(ids), **more}) for ids in token_ids])
        return [told.get("prompt", told.get("text")) for told in found]

    async def finish_session(self, session_id: Any) -> None:
        """Tell the router to forget a session; the refusal of a router without that route is ignored."""
        query, until = {"session_id": str(session_id)}, self._until()
        await self._requests.here().session.call("POST", f"{self.proxy_url}/finish_session", query=query, until=until)

    async def post(self, route: str, body: Any = None, *, session_id: Any = None) -> Any:
        """Call any other route for requests, through the router, and return the JSON answer."""
        return await self._requests.here().post(route, body, session_id, self._until())

    def fleet(self, **settings: Any) -> Fleet:
        """Return a client for `WeightSender` that drives every engine through whole updates.

        Args:
            settings: as for `torchrl_ext.connect`.
        """
        return connect(*self.server_urls, api_key=self.api_key, **settings)

    # running and closing

    def run(self, call: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        """Await ``call`` from code without an event loop: ``client.run(client.pause())``.

        Raises:
            DeadlineError: it took longer than ``timeout_s`` seconds.
            EngineError: the client was closed meanwhile.
        """
        return self._background.run(call, timeout_s)

    async def teardown(self) -> None:
        """Drop this event loop's connections; a later call opens new ones."""
        await self._requests.close()

    def close(self) -> None:
        """Close what `run` has opened; each `run` that waits ends with an error. May be called twice."""
        self._background.close(self.teardown())

    async def __aenter__(self) -> RemoteInferenceClient:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.teardown()

    def __reduce__(self) -> tuple[Any, ...]:
        given = {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.init}
        return functools.partial(RemoteInferenceClient, **given), ()

    # helpers

    @property
    def _engines(self) -> tuple[str, Sequence[str], dict[str, Any]]:
        return self.kind, self.server_urls, {"api_key": self.api_key, "load_timeout_s": self.control_timeout_s}

    def _until(self) -> float:
        return time.monotonic() + self.timeout_s

    async def _all(
        self, requests: Sequence[GenerationRequest], sessions: Sequence[Any], model: str | None, **extra: Any
    ) -> list[Generation]:
        """Return one continuation per request, by the model that is named, else the adapter or the client's model."""
        adapter = None if model else self.adapter
        extra["model"] = model or (self.model_name if adapter is None else None)  # the dialect names an adapter itself
        more = {name: value for name, value in extra.items() if value is not None}
        asked = [
            Asked(
                request=dataclasses.replace(request, adapter=adapter),
                session_id=session,
                more=more,
                texts=self.detokenize,
            )
            for request, session in zip(requests, sessions, strict=True)
        ]
        return [one for (one,) in await self._requests.here().generations(asked, self._until())]

    async def _completed(self, route: str, kind: type[Continuation], payload: Mapping[str, Any]) -> Info:
        body, session_id = self._body(payload)
        return await self._requests.here().completion(route, kind(body), session_id, self._until())

    def _model(self) -> Info:
        return {} if self.model_name is None else {"model": self.model_name}

    def _body(self, payload: Mapping[str, Any]) -> tuple[Info, Any]:
        adapted = dialects.make(self.kind).adapted(self.adapter)
        body = {**self._model(), **adapted, **(payload.get("json") or {})}
        return body, body.pop("session_id", None)


def _request(prompt: Sequence[int], sampling: Mapping[str, Any], index: int) -> GenerationRequest:
    """Return the request for a prompt with vLLM's ``sampling_params``."""
    more = {name: value for name, value in sampling.items() if value is not None}
    known = {name: more.pop(name) for name in ("max_tokens", "temperature", "seed") if name in more}
    logprobs = more.pop("logprobs", None) is not None
    stops = tuple(more.pop("stop_token_ids", ()))
    ids = checked_prompt(prompt, index)
    return GenerationRequest(token_ids=ids, logprobs=logprobs, stop_token_ids=stops, more=more, **known)
