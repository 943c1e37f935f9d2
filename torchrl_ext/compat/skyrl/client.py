"""`RemoteInferenceClient`: sends token requests through a router and control calls to every engine.

The split, the names, inputs and outputs are those of SkyRL's client of that name (its "Inference Architecture" page).
In addition, answers have weight versions per token, and generations that an engine aborted continue.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from torchrl_ext.compat.skyrl.control import EngineControl
from torchrl_ext.errors import ConfigError, EngineError, EngineRefusedError, RouteAbsent
from torchrl_ext.rollout.generation import Generation, GenerationRequest, checked_prompt
from torchrl_ext.rollout.requests import Requests, back_off, targets
from torchrl_ext.rpc.connections import each, run
from torchrl_ext.types import Info

if TYPE_CHECKING:
    from torchrl_ext.serving.routing import Routing

__all__ = ["RemoteInferenceClient"]

_T = TypeVar("_T")
_CONCURRENCY = "SKYRL_GENERATE_CONCURRENCY_PER_ENGINE"
_SAMPLING = {
    **{name: name for name in ("temperature", "max_tokens", "seed", "top_k", "top_p")},
    **{"stop_strings": "stop", "stop_tokens": "stop_token_ids"},
}
"""Sampling settings of `RemoteInferenceClient.sample` -> vLLM's."""


@dataclass(kw_only=True)
class RemoteInferenceClient(EngineControl):
    """Sends requests to a router and control calls to the engines behind it; picklable.

    Methods are coroutines that work in any event loop; `run` calls one from synchronous code.

    A call for tokens or text is retried until its deadline, unless an engine refuses the request. It raises
    EngineUnreachableError, EngineRefusedError or DeadlineError if no usable answer arrives.

    Attributes:
        proxy_url: base address of the router (or of the only engine), for token requests.
        model_name: ``model`` of requests; None leaves it to the engine.
        tokenizer: turns tokens into text and back, if given, instead of the engines' routes.
        concurrency_per_engine: maximum requests in flight per engine, over all calls; 0 for no limit. None takes
            ``SKYRL_GENERATE_CONCURRENCY_PER_ENGINE`` from the environment, or 512.
        timeout_s: deadline of a call for tokens, for all its prompts together, in seconds.

    Raises:
        ConfigError: invalid addresses or numbers.
    """

    proxy_url: str
    model_name: str | None = None
    tokenizer: Any = field(default=None, repr=False, compare=False)
    concurrency_per_engine: int | None = None
    timeout_s: float = 1800.0
    _requests: Requests = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        given, limit = os.environ.get(_CONCURRENCY, "512"), self.concurrency_per_engine
        if limit is None:
            if not given.isdecimal():
                raise ConfigError(f"{_CONCURRENCY}={given!r} in the environment", expected="a whole number")
            limit = int(given)
        if limit < 0:
            raise ConfigError(f"concurrency_per_engine is {limit}", expected="at least 0")
        proxy = targets([self.proxy_url], self.kind)
        (self.proxy_url,) = proxy
        if len(self.server_urls) > 1 and self.proxy_url in self.server_urls:
            raise ConfigError(
                f"proxy_url {self.proxy_url} is one of {len(self.server_urls)} servers: the others would get no "
                "requests",
                hint="put a router in front of them (torchrl_ext.serving.routing.Routing)",
            )
        limit *= len(self.server_urls)
        self._requests = Requests(proxy, limit=limit, api_key=self.api_key, persistent=True)

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

    def run(self, call: Coroutine[Any, Any, _T]) -> _T:
        """Await a call of this client from synchronous code: ``client.run(client.pause())``.

        Raises:
            ConfigError: called from a coroutine that `run` awaits, which would be a deadlock.
        """
        return run(call)

    def close(self) -> None:
        """Close the connections; pending requests fail. May be called twice; a later call connects again."""
        self._requests.close()

    async def teardown(self) -> None:
        """Call `close` from a coroutine."""
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        given = {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.init}
        return functools.partial(type(self), **given), ()

    # tokens

    async def generate(self, input_batch: Mapping[str, Any], model: str | None = None) -> Info:
        """Continue prompts, with one request per prompt.

        Args:
            input_batch: ``prompt_token_ids`` (token ids per prompt), ``sampling_params`` (vLLM's names; ``n`` is 1);
                optionally ``session_ids`` (one per prompt: prompts of one session stay on one engine).
            model: replaces ``model_name``.

        Returns:
            Lists with one entry per prompt: ``responses`` (text; None if neither side has a tokenizer),
            ``response_ids``, ``stop_reasons``, ``response_logprobs`` (None unless requested), ``weight_versions``
            (version number per token; -1 where an engine reports none).

        Raises:
            ConfigError: no token ids, an empty prompt, or ``n`` above 1.
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
        rows = enumerate(zip(prompts, sessions, strict=True))
        found = await self._generated([self._request(prompt, i, sampling, one, model) for i, (prompt, one) in rows])
        texts = None
        if self.tokenizer is not None or self.kind != "embedded":
            texts = await self.detokenize([one.token_ids for one in found])
        return {
            "responses": texts,
            "response_ids": [list(one.token_ids) for one in found],
            "stop_reasons": [one.finish_reason for one in found],
            "response_logprobs": (None if sampling.get("logprobs") is None else [list(one.logprobs) for one in found]),
            "weight_versions": [one.token_versions() for one in found],
        }

    async def sample(self, request_payload: Mapping[str, Any]) -> Info:
        """Continue one prompt several times; given a seed, continuation i is sampled with ``seed + i``.

        Args:
            request_payload: ``{"json": body}`` with ``prompt`` (with ``chunks`` of ``tokens``), ``num_samples``,
                ``sampling_params``, ``session_id`` and ``model``.

        Returns:
            ``{"type": "sample", "sequences"}``; each sequence is ``{"tokens", "logprobs", "stop_reason"}``.
            Log-probabilities are in nats.

        Raises:
            ConfigError: as for `generate`.
        """
        body = request_payload.get("json") or {}
        ids = [token for chunk in (body.get("prompt") or {}).get("chunks") or [] for token in chunk["tokens"]]
        given = body.get("sampling_params") or {}
        sampling = {"logprobs": 0, **{own: given.get(name) for name, own in _SAMPLING.items()}}
        request = self._request(ids, 0, sampling, body.get("session_id"), body.get("model"))
        found = await self._generated([dataclasses.replace(request, n=body.get("num_samples", 1))])
        sequences = [
            {"tokens": list(one.token_ids), "logprobs": list(one.logprobs) or None, "stop_reason": one.finish_reason}
            for one in found
        ]
        return {"type": "sample", "sequences": sequences}

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
        return await self._post(f"/v1/{kind}/render", body, session_id)

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

    # helpers

    async def _post(self, route: str, body: Any, session_id: Any = None) -> Any:
        return await self._requests.post(route, body, session_id, self._until())

    async def _of_text(self, route: str, body: Info) -> Any:
        """Call a route that tokenizes or detokenizes through the router, or on a server if the router lacks the route.

        SGLang's router has such routes under other names, for tokenizers of its own.
        """
        body = body if self.model_name is None else {**body, "model": self.model_name}
        try:
            return await self._post(route, body)
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

    async def _generated(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        return await self._requests.generations(requests, self._until(), self.detokenize)

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
        model, session_id = body.pop("model", None) or self.model_name, body.pop("session_id", None)
        return {**({"model": model} if model else {}), **body}, session_id

    def _request(
        self, prompt: Sequence[int], index: int, sampling: Mapping[str, Any], session_id: Any, model: str | None
    ) -> GenerationRequest:
        """Return the request for a prompt from vLLM's ``sampling_params``."""
        more, model = {name: value for name, value in sampling.items() if value is not None}, model or self.model_name
        known = {name: more.pop(name) for name in ("max_tokens", "temperature", "seed") if name in more}
        return GenerationRequest(
            token_ids=checked_prompt(prompt, index),
            logprobs=more.pop("logprobs", None) is not None,
            stop_token_ids=tuple(more.pop("stop_token_ids", ())),
            more=more,
            session_id=session_id,
            fields={"model": model} if model else {},
            **known,
        )
