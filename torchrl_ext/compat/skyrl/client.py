"""`RemoteInferenceClient`: sends token requests through a router and control calls to every engine.

The split, the names, inputs and outputs are those of SkyRL's client of that name (its "Inference Architecture" page).
In addition, answers have weight versions per token, and generations that an engine aborted continue.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import logging
import os
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from torchrl_ext.compat.skyrl import sampling as samples
from torchrl_ext.compat.skyrl.control import EngineControl
from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, EngineRefusedError, RouteAbsent, WeightSyncError
from torchrl_ext.rollout.dialects import Dialect
from torchrl_ext.rollout.generation import Generation, GenerationRequest, checked_prompt
from torchrl_ext.rollout.requests import Requests, back_off, targets
from torchrl_ext.rpc.connections import CALLERS, each, run
from torchrl_ext.rpc.http import HTTPSession
from torchrl_ext.types import Info

if TYPE_CHECKING:
    from torchrl_ext.serving.routing import Routing

__all__ = ["RemoteInferenceClient"]

log = logging.getLogger("torchrl_ext")

_T = TypeVar("_T")
_CONCURRENCY, _CONNECTIONS = "SKYRL_GENERATE_CONCURRENCY_PER_ENGINE", "SKYRL_HTTP_CONNECTION_LIMIT"
_FORGET_TIMEOUT_S = 10.0
_EXPERTS_ROUTE = "/skyrl/v1/generate"
_KEPT = ("_updates", "_sizes", "_base", "_fetched", "_loading")  # when the client is pickled


@dataclass(kw_only=True)
class RemoteInferenceClient(EngineControl):
    """Sends requests to a router and control calls to the engines behind it; picklable.

    Methods are coroutines that work in any event loop; `run` calls them from synchronous code.

    A call for tokens or text is retried until its deadline, unless an engine refuses the request. It raises
    EngineUnreachableError, EngineRefusedError or DeadlineError if no usable answer arrives.

    Attributes:
        proxy_url: base address of the router (or of the only engine), for token requests.
        model_name: ``model`` of requests; None leaves it to the engine.
        enable_return_routed_experts: request the experts to which each token was routed; from vLLM servers only.
        tokenizer: converts text, if given, instead of the engines' routes.
        concurrency_per_engine: maximum requests in flight per engine, over all calls; 0 for no limit. None takes
            ``SKYRL_GENERATE_CONCURRENCY_PER_ENGINE`` from the environment, or 512.
        timeout_s: deadline of a call for tokens, for all its prompts together, in seconds.

    Raises:
        ConfigError: invalid addresses or numbers.
    """

    proxy_url: str
    model_name: str | None = None
    enable_return_routed_experts: bool = False
    tokenizer: Any = field(default=None, repr=False, compare=False)
    concurrency_per_engine: int | None = None
    timeout_s: float = 1800.0
    _dialect: Dialect = field(init=False, repr=False, compare=False)
    _requests: Requests = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        servers, dp_size = self.server_urls, self.data_parallel_size
        limit = _number_from(_CONCURRENCY, 512) if self.concurrency_per_engine is None else self.concurrency_per_engine
        if dp_size < 1 or len(servers) % dp_size or limit < 0:
            raise ConfigError(
                f"{len(servers)} servers, data_parallel_size={dp_size}, concurrency_per_engine={limit}",
                expected="servers in groups of data_parallel_size, and a limit of at least 0",
            )
        if self.enable_return_routed_experts and self.kind != "vllm":
            raise ConfigError(f"routed experts are not read from {self.kind} engines", expected='kind="vllm"')
        proxy = targets([self.proxy_url], self.kind)
        ((self.proxy_url, self._dialect),) = proxy.items()
        if len(servers) > 1 and self.proxy_url in servers:
            raise ConfigError(
                f"proxy_url {self.proxy_url} is one of {len(servers)} servers: the others would get no requests",
                hint="put a router in front of them (torchrl_ext.serving.routing.Routing)",
            )
        how: dict[str, Any] = {"limit": limit * len(servers) // dp_size, "api_key": self.api_key, "persistent": True}
        how["connection_limit"] = _number_from(_CONNECTIONS, 0)
        self._requests = Requests(proxy, **how)

    @classmethod
    def of(cls, routing: Routing, **settings: Any) -> RemoteInferenceClient:
        """Return a client for the router of ``routing`` and every engine behind it.

        Args:
            settings: further fields of the class.

        Raises:
            ConfigError: there is no engine.
        """
        if not routing.engines:
            raise ConfigError(f"no engine is registered at router {routing.url}")
        urls, kind = tuple(info.url for info in routing.engines), routing.engines[0].kind
        return cls(proxy_url=routing.url, server_urls=urls, kind=kind, **{"api_key": routing.api_key, **settings})

    def get_endpoint_url(self) -> str:
        """Return the address of token requests."""
        return self.proxy_url

    # running and closing

    def run(self, call: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        """Await ``call`` from synchronous code: ``client.run(client.pause())``.

        Raises:
            DeadlineError: it took longer than ``timeout_s`` seconds.
            ConfigError: called from a coroutine that `run` awaits, which would be a deadlock.
        """
        try:
            return run(asyncio.wait_for(call, timeout_s), CALLERS)
        except WeightSyncError:
            call.close()  # it may not have started
            raise
        except asyncio.TimeoutError as error:
            raise DeadlineError(f"the call took longer than {timeout_s} s") from error

    async def teardown(self) -> None:
        """Call `close` from a coroutine."""
        self.close()

    aclose = teardown

    def close(self) -> None:
        """Close the connections, and forget what engines reported; pending requests fail.

        May be called twice; a later call connects again.
        """
        self._sizes = self._receivers = None
        self._requests.close()

    async def __aenter__(self) -> RemoteInferenceClient:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.teardown()

    def __reduce__(self) -> tuple[Any, ...]:
        given = {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.init}
        return functools.partial(type(self), **given), (), {name: getattr(self, name) for name in _KEPT}

    # tokens

    async def generate(self, input_batch: Mapping[str, Any], model: str | None = None) -> Info:
        """Continue prompts, with one request per prompt.

        Args:
            input_batch: ``prompt_token_ids`` (token ids per prompt), ``sampling_params`` (vLLM's names; ``n`` is 1);
                optionally ``session_ids`` (one per prompt: prompts of one session stay on one engine), ``mm_features``
                (image features per prompt, as `render` returns them), ``cache_salt`` (characters that vLLM refuses are
                replaced).
            model: replaces ``model_name``.

        Returns:
            Lists with one entry per prompt: ``responses`` (text; None if neither side has a tokenizer),
            ``response_ids``, ``stop_reasons``, ``response_logprobs`` (None unless requested), ``weight_versions``
            (version number per token; -1 where an engine reports none). With `enable_return_routed_experts` also
            ``rollout_expert_indices``, integer arrays ``[tokens, layers, experts]`` over prompt and continuation; else
            None.

        Raises:
            ConfigError: no token ids, an empty prompt, ``n`` above 1, or no model while updates bring only an adapter.
        """
        prompts = input_batch.get("prompt_token_ids")
        if prompts is None:
            raise ConfigError("input_batch has no prompt_token_ids", hint="render or tokenize prompts first")
        sampling = dict(input_batch.get("sampling_params") or {})
        if sampling.pop("n", 1) != 1:
            raise ConfigError("generate returns one continuation per prompt", hint="repeat the prompt, or call sample")
        sessions = input_batch.get("session_ids") or [None] * len(prompts)
        if len(sessions) != len(prompts):
            raise ConfigError(f"{len(sessions)} session_ids for {len(prompts)} prompts", expected="one per prompt")
        salt, features = samples.safe_salt(input_batch.get("cache_salt")), input_batch.get("mm_features")
        rows = zip(prompts, sessions, features or [None] * len(prompts), strict=True)
        requests = [
            _request(prompt, i, sampling, session, cache_salt=salt, features=one)
            for i, (prompt, session, one) in enumerate(rows)
        ]
        found = await self._all(requests, self._resolved(model))
        texts = None
        if self.tokenizer is not None or self.kind != "embedded":
            texts = await self.detokenize([one.token_ids for one in found])
        scored, routed = bool(requests) and requests[0].logprobs, self.enable_return_routed_experts
        return {
            "responses": texts,
            "response_ids": [list(one.token_ids) for one in found],
            "stop_reasons": [one.finish_reason for one in found],
            "response_logprobs": [list(one.logprobs) for one in found] if scored else None,
            "weight_versions": [one.token_versions() for one in found],
            "rollout_expert_indices": [samples.routed_experts(one) for one in found] if routed else None,
        }

    async def sample(self, request_payload: Mapping[str, Any]) -> Info:
        """Continue one prompt several times; given a seed, continuation i is sampled with ``seed + i``.

        Args:
            request_payload: ``{"json": body}`` with ``prompt`` (with ``chunks`` of ``tokens`` and of images),
                ``num_samples``, ``sampling_params``, ``session_id``, ``model``, ``include_prompt_logprobs`` and
                ``topk_prompt_logprobs``.

        Returns:
            ``{"type": "sample", "sequences", "prompt_logprobs", "topk_prompt_logprobs"}``; each sequence is
            ``{"tokens", "logprobs", "stop_reason"}``. Log-probabilities are in nats.

        Raises:
            ConfigError: as for `generate`.
        """
        body = request_payload.get("json") or {}
        session_id, model = body.get("session_id"), self._resolved(body.get("model"))
        chunks = (body.get("prompt") or {}).get("chunks") or []
        rendered = {}
        if messages := samples.image_messages(chunks):
            rendered = await self.render({"json": {"messages": messages, "session_id": session_id, "model": model}})
        ids, features = samples.spliced(chunks, rendered)
        request = _request(ids, 0, {"logprobs": 0, **samples.sampling_of(body)}, session_id, features=features)
        found = await self._all([dataclasses.replace(request, n=body.get("num_samples", 1))], model)
        prompt, top = None, None
        if samples.wants_prompt(body):
            prompt, top = samples.prompt_logprobs(ids, found[0], body.get("topk_prompt_logprobs") or 0)
        sequences = [
            {"tokens": list(one.token_ids), "logprobs": list(one.logprobs) or None, "stop_reason": one.finish_reason}
            for one in found
        ]
        return {"type": "sample", "sequences": sequences, "prompt_logprobs": prompt, "topk_prompt_logprobs": top}

    async def chat_completion(self, request_payload: Mapping[str, Any]) -> Info:
        """Request a chat completion over ``/v1/chat/completions``; if an engine aborts it, the request starts again.

        Args:
            request_payload: ``{"json": body}``; ``session_id`` in the body selects the engine and is not forwarded.

        Returns:
            The engine's answer.
        """
        return await self._completed("/v1/chat/completions", request_payload)

    async def completion(self, request_payload: Mapping[str, Any]) -> Info:
        """Request a text completion over ``/v1/completions``; otherwise like `chat_completion`."""
        return await self._completed("/v1/completions", request_payload)

    async def render(self, request_payload: Mapping[str, Any]) -> Any:
        """Return an engine's rendering of a chat (``messages``) or a completion (``prompt``), with its token ids.

        Raises:
            ConfigError: the engines are SGLang's, which have no such route.
        """
        if self.kind == "sglang":
            raise ConfigError(
                "SGLang does not render chats", hint="give the client a tokenizer, and use its chat template"
            )
        body, session_id = self._body(request_payload)
        kind = "chat/completions" if "messages" in body else "completions"
        return await self.post(f"/v1/{kind}/render", body, session_id=session_id)

    render_chat_completion = render

    async def tokenize(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text, from `tokenizer` or else from an engine."""
        if self.tokenizer is not None:
            return [list(self.tokenizer(one, add_special_tokens=add_special_tokens)["input_ids"]) for one in texts]
        bodies = [{"prompt": one, "add_special_tokens": add_special_tokens} for one in texts]
        answers = await each([self._of_text("/tokenize", body) for body in bodies])
        return [answer["tokens"] for answer in answers]

    async def detokenize(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each list of token ids, from `tokenizer` or else from an engine."""
        if self.tokenizer is not None:
            return self.tokenizer.batch_decode([list(ids) for ids in token_ids], skip_special_tokens=True)
        answers = await each([self._of_text("/detokenize", {"tokens": list(ids)}) for ids in token_ids])
        return [answer.get("prompt", answer.get("text")) for answer in answers]

    async def finish_session(self, session_id: Any) -> None:
        """Tell the router to forget a session, within ten seconds; only log a failure. Skip an empty ``session_id``."""
        if session_id in (None, ""):
            return
        router = HTTPSession(self.proxy_url, api_key=self.api_key, timeout_s=_FORGET_TIMEOUT_S)
        try:
            (await router.exchange("POST", "/finish_session", query={"session_id": str(session_id)})).checked()
        except RouteAbsent:
            return  # not every router has this route
        except (EngineError, DeadlineError) as error:
            log.warning("session %s was not ended: %s", session_id, error)

    async def post(self, route: str, body: Any = None, *, session_id: Any = None) -> Any:
        """Call any other request route through the router, and return the JSON answer."""
        return await self._requests.post(route, body, session_id, self._until())

    # helpers

    async def _of_text(self, route: str, body: Info) -> Any:
        """Call a route that tokenizes or detokenizes through the router, or on a server if the router lacks the route.

        SGLang's router has such routes under other names, for tokenizers of its own.
        """
        body = body if self.model_name is None else {**body, "model": self.model_name}
        try:
            return await self.post(route, body)
        except RouteAbsent as error:
            if self.proxy_url in self.server_urls:
                raise
            why: EngineError = error
        until = self._until()
        for http in self._sessions.values():
            try:
                answer = await http.exchange("POST", route, body, timeout_s=until - time.monotonic())
                return answer.checked_json()
            except EngineError as other:  # the server is down, or is an encoder without a tokenizer
                why = other
        raise why

    async def _all(self, requests: Sequence[GenerationRequest], model: str | None) -> list[Generation]:
        """Return the continuations of all requests, from ``model``, or else from the adapter."""
        how: dict[str, Any] = {"adapter": None if model else self.adapter}
        how["route"] = _EXPERTS_ROUTE if self.enable_return_routed_experts else None
        named = {"model": model} if model else {}
        asked = [dataclasses.replace(one, fields={**one.fields, **named}, **how) for one in requests]
        until = self._until()
        try:
            return await self._requests.generations(asked, until, self.detokenize)
        except RouteAbsent:
            if not self.enable_return_routed_experts:
                raise
            asked = [dataclasses.replace(one, route=None) for one in asked]  # vLLM's own route returns them, too
            return await self._requests.generations(asked, until, self.detokenize)

    async def _completed(self, route: str, payload: Mapping[str, Any]) -> Info:
        """Return an OpenAI-style answer that no engine aborted."""
        body, session_id = self._body(payload)
        until = self._until()
        attempts, where = itertools.count(), f"{self.proxy_url}{route}"
        while True:
            answer = await self._requests.post(route, body, session_id, until)
            try:
                aborted = any(choice.get("finish_reason") == "abort" for choice in answer["choices"])
            except (KeyError, TypeError, AttributeError) as error:
                raise EngineRefusedError(f"{where} gave no completion: {error!r}") from None
            if not aborted:
                return answer
            await back_off(next(attempts), until, EngineError(f"{where}: an engine aborted the request"))

    def _until(self) -> float:
        return time.monotonic() + self.timeout_s

    def _body(self, payload: Mapping[str, Any]) -> tuple[Info, Any]:
        body = dict(payload.get("json") or {})
        model, session_id = self._resolved(body.pop("model", None)), body.pop("session_id", None)
        named = self._dialect.adapted(self.adapter) if model is None else {"model": model}
        return {**named, **body}, session_id

    def _resolved(self, model: str | None) -> str | None:
        """Return a request's model; None if `adapter` names it or the engine chooses. Raise ConfigError if updates
        bring only an adapter and the request would get the base model."""
        if model or self.adapter is not None:
            return model or None
        if self.uses_lora_weight_sync:
            raise ConfigError(
                "LoRA is enabled, but the request names no model, so it would use the base weights",
                hint="pass the adapter's name as model, or create the client with adapter=",
            )
        return self.model_name


def _request(
    prompt: Sequence[int], index: int, sampling: Mapping[str, Any], session_id: Any, **fields: Any
) -> GenerationRequest:
    """Return the request for a prompt from vLLM's ``sampling_params``, with the fields that are not None."""
    more = {name: value for name, value in sampling.items() if value is not None}
    known = {name: more.pop(name) for name in ("max_tokens", "temperature", "seed") if name in more}
    return GenerationRequest(
        token_ids=checked_prompt(prompt, index),
        logprobs=more.pop("logprobs", None) is not None,
        stop_token_ids=tuple(more.pop("stop_token_ids", ())),
        more=more,
        session_id=session_id,
        fields={name: value for name, value in fields.items() if value is not None},
        **known,
    )


def _number_from(variable: str, default: int) -> int:
    """Return the integer in an environment variable, or ``default`` if unset; raise ConfigError for other text."""
    given = os.environ.get(variable)
    if given is not None and not given.isdecimal():
        raise ConfigError(f"{variable}={given!r} in the environment", expected="a whole number")
    return default if given is None else int(given)
