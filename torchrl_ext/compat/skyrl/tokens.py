"""Requests for tokens in the shapes of SkyRL's client: each goes to the router, and is continued after an abort."""

from __future__ import annotations

import dataclasses
import logging
import time
from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Any, overload

from torchrl_ext.compat.skyrl import sampling as samples
from torchrl_ext.compat.skyrl.completions import ChatContinuation, Continuation, TextContinuation
from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, EngineRefusedError
from torchrl_ext.registry import engines
from torchrl_ext.rollout.generation import Generation, GenerationRequest, checked_prompt
from torchrl_ext.rollout.requests import Asked, Requests
from torchrl_ext.rpc.connections import PerLoop, each
from torchrl_ext.types import Info

__all__ = ["TokenRequests"]

log = logging.getLogger("torchrl_ext")

_FORGET_TIMEOUT_S = 10.0
_EXPERTS_ROUTE, _ABSENT = "/skyrl/v1/generate", (404, 405)


class TokenRequests(ABC):
    """Asks a router for tokens, with the methods of SkyRL's client; the attributes are those of the client."""

    proxy_url: str
    server_urls: Sequence[str]
    kind: str
    model_name: str | None
    adapter: str | None
    uses_lora_weight_sync: bool
    enable_return_routed_experts: bool
    tokenizer: Any
    timeout_s: float
    _requests: PerLoop[Requests]

    async def generate(self, input_batch: Mapping[str, Any], model: str | None = None) -> Info:
        """Continue prompts, each with a request of its own.

        Args:
            input_batch: ``prompt_token_ids`` (token ids per prompt), ``sampling_params`` (vLLM's names; ``n`` is 1),
                ``session_ids`` (one per prompt, or absent: prompts of one session stay on one engine), ``mm_features``
                (per prompt, or absent: the features of its images, as `render` gives them), ``cache_salt`` (characters
                that vLLM refuses are replaced).
            model: takes the place of ``model_name``.

        Returns:
            Lists with one entry per prompt: ``responses`` (text; None without a tokenizer on either side),
            ``response_ids``, ``stop_reasons``, ``response_logprobs`` (None where none were asked for), and
            ``weight_versions`` (the number of the version that sampled each token; -1 where an engine does not say),
            and ``rollout_expert_indices``, with `enable_return_routed_experts`: arrays of integers, of shape
            ``[tokens, layers, experts]``, over prompt and continuation; otherwise None.

        Raises:
            ConfigError: no token ids, an empty prompt, ``n`` above 1, or no model where updates bring an adapter alone.
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
        features = input_batch.get("mm_features") or [None] * len(prompts)
        salt, model = samples.safe_salt(input_batch.get("cache_salt")), self._resolved(model)
        more = [{"cache_salt": salt, "features": one} for one in features]
        found = await self._all(requests, sessions, model, more)
        texts = None
        if self.tokenizer is not None or self.kind != "embedded":
            texts = await self.detokenize([one.token_ids for one in found])
        return {
            "responses": texts,
            "response_ids": [list(one.token_ids) for one in found],
            "stop_reasons": [one.finish_reason for one in found],
            "response_logprobs": [list(one.logprobs) for one in found] if requests and requests[0].logprobs else None,
            "weight_versions": [one.token_versions() for one in found],
            "rollout_expert_indices": [samples.routed_experts(one) for one in found]
            if self.enable_return_routed_experts
            else None,
        }

    @overload
    async def sample(self, prompt_token_ids: Mapping[str, Any]) -> Info: ...

    @overload
    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        *,
        num_samples: int = 1,
        sampling_params: Mapping[str, Any] | None = None,
        session_id: Any = None,
        model: str | None = None,
    ) -> list[Generation]: ...

    async def sample(
        self,
        prompt_token_ids: Sequence[int] | Mapping[str, Any],
        *,
        num_samples: int = 1,
        sampling_params: Mapping[str, Any] | None = None,
        session_id: Any = None,
        model: str | None = None,
    ) -> list[Generation] | Info:
        """Continue one prompt ``num_samples`` times; with a seed, continuation i is sampled with ``seed + i``.

        Args:
            prompt_token_ids: token ids. Or SkyRL's ``{"json": request}``, which has everything: ``prompt`` (with
                ``chunks`` of ``tokens`` and of images), ``num_samples``, ``sampling_params``, ``session_id``,
                ``model``, ``include_prompt_logprobs`` and ``topk_prompt_logprobs``.

        Returns:
            The continuations. For SkyRL's request its answer: ``{"type": "sample", "sequences": [{"tokens",
            "logprobs", "stop_reason"}], "prompt_logprobs", "topk_prompt_logprobs"}``, with log-probabilities in nats.

        Raises:
            ConfigError, EngineUnreachableError, EngineRefusedError, DeadlineError: as for `generate`.
        """
        if isinstance(prompt_token_ids, Mapping):
            return await self._sampled(prompt_token_ids)
        request = _request(prompt_token_ids, {"logprobs": 0, **(sampling_params or {})}, 0)
        requests = dataclasses.replace(request, n=num_samples).split()
        found = await self._all(requests, [session_id] * num_samples, self._resolved(model), [{}] * num_samples)
        return found

    async def _sampled(self, payload: Mapping[str, Any]) -> Info:
        """Answer SkyRL's request for samples."""
        body = payload.get("json") or {}
        session_id, model = body.get("session_id"), self._resolved(body.get("model"))
        chunks = (body.get("prompt") or {}).get("chunks") or []
        messages, rendered = samples.image_messages(chunks), {}
        if messages:
            asked = {"messages": messages, "session_id": session_id, **({"model": model} if model else {})}
            rendered = await self.render({"json": asked})
        ids, features = samples.spliced(chunks, rendered)
        count = body.get("num_samples", 1)
        request = dataclasses.replace(_request(ids, {"logprobs": 0, **samples.sampling_of(body)}, 0), n=count)
        apart = engines.part(self.kind, "dialect")().one_seed_per_request and request.seed is not None
        requests = request.split() if apart else [request]
        each_with = [{"features": features}] * len(requests)
        found = await self._all(requests, [session_id] * len(requests), model, each_with)
        prompt, top = None, None
        if samples.wants_prompt(body):
            prompt, top = samples.prompt_logprobs(ids, found[0], body.get("topk_prompt_logprobs") or 0)
        sequences = [samples.sequence(one) for one in found]
        return {"type": "sample", "sequences": sequences, "prompt_logprobs": prompt, "topk_prompt_logprobs": top}

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
        """Return the token ids of each text, from `tokenizer` or else from an engine.

        Raises:
            EngineUnreachableError, EngineRefusedError, DeadlineError: no answer in time, or no usable one.
        """
        if self.tokenizer is not None:
            return [list(self.tokenizer(one, add_special_tokens=add_special_tokens)["input_ids"]) for one in texts]
        more = {"add_special_tokens": add_special_tokens, **self._model()}
        found = await each([self._of_text("/tokenize", {"prompt": one, **more}) for one in texts])
        return [told["tokens"] for told in found]

    async def detokenize(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each list of token ids, from `tokenizer` or else from an engine.

        Raises:
            EngineUnreachableError, EngineRefusedError, DeadlineError: no answer in time, or no usable one.
        """
        if self.tokenizer is not None:
            return self.tokenizer.batch_decode([list(ids) for ids in token_ids], skip_special_tokens=True)
        more = self._model()
        found = await each([self._of_text("/detokenize", {"tokens": list(ids), **more}) for ids in token_ids])
        return [told.get("prompt", told.get("text")) for told in found]

    async def finish_session(self, session_id: Any) -> None:
        """Tell the router to forget a session, within ten seconds; a failure is logged, and nothing else.

        Args:
            session_id: an empty one is not sent.
        """
        if session_id in (None, ""):
            return
        query, until = {"session_id": str(session_id)}, time.monotonic() + _FORGET_TIMEOUT_S
        session, url = self._requests.here().session, f"{self.proxy_url}/finish_session"
        try:
            answer = await session.call("POST", url, query=query, until=until)
        except (EngineError, DeadlineError) as error:
            log.warning("session %s is not forgotten: %s", session_id, error)
            return
        if not answer.ok and answer.status not in _ABSENT:  # other routers have no such route
            log.warning("session %s is not forgotten: %s answered %d", session_id, url, answer.status)

    async def post(self, route: str, body: Any = None, *, session_id: Any = None) -> Any:
        """Call any other route for requests, through the router, and return the JSON answer.

        Raises:
            EngineUnreachableError, EngineRefusedError, DeadlineError: no answer in time, or no usable one.
        """
        return await self._requests.here().post(route, body, session_id, self._until())

    async def _of_text(self, route: str, body: Info) -> Any:
        """Call a route that turns text into tokens or back: through the router, or at a server where it has none.

        SGLang's router has such routes under other names, for tokenizers that it was given itself.
        """
        try:
            return await self.post(route, body)
        except EngineRefusedError as error:
            if error.status not in _ABSENT or self.proxy_url in self.server_urls:
                raise
            why: EngineError = error
        session, until = self._requests.here().session, self._until()
        for url in self.server_urls:
            try:
                return await session.json("POST", url + route, body, until=until)
            except EngineError as other:  # it is gone, or has no tokenizer: an encoder
                why = other
        raise why

    def _until(self) -> float:
        return time.monotonic() + self.timeout_s

    async def _all(
        self,
        requests: Sequence[GenerationRequest],
        sessions: Sequence[Any],
        model: str | None,
        extra: Sequence[Mapping[str, Any]],
    ) -> list[Generation]:
        """Return the continuations of all requests, by the model that is named, or else the adapter."""
        fields = [{**one, "model": model} for one in extra]
        asked = [
            Asked(
                request=dataclasses.replace(request, adapter=None if model else self.adapter),
                session_id=None if session == "" else session,
                more={name: value for name, value in more.items() if value is not None},
                texts=self.detokenize,
                route=_EXPERTS_ROUTE if self.enable_return_routed_experts else None,
            )
            for request, session, more in zip(requests, sessions, fields, strict=True)
        ]
        until, here = self._until(), self._requests.here()
        try:
            found = await here.generations(asked, until)
        except EngineRefusedError as error:
            if error.status not in _ABSENT or not self.enable_return_routed_experts:
                raise
            asked = [dataclasses.replace(one, route=None) for one in asked]  # vLLM's own route has them, too
            found = await here.generations(asked, until)
        return [one for row in found for one in row]

    async def _completed(self, route: str, kind: type[Continuation], payload: Mapping[str, Any]) -> Info:
        body, session_id = self._body(payload)
        return await self._requests.here().completion(route, kind(body), session_id, self._until())

    def _model(self) -> Info:
        return {} if self.model_name is None else {"model": self.model_name}

    def _body(self, payload: Mapping[str, Any]) -> tuple[Info, Any]:
        body = dict(payload.get("json") or {})
        model = self._resolved(body.pop("model", None))
        named = engines.part(self.kind, "dialect")().adapted(self.adapter) if model is None else {"model": model}
        body = {**named, **body}
        session_id = body.pop("session_id", None)
        return body, None if session_id == "" else session_id

    def _resolved(self, model: str | None) -> str | None:
        """Return the model that a request is for; None where `adapter` names it, or the engine is to choose.

        Raises:
            ConfigError: updates bring an adapter alone, and the request would get the base model.
        """
        if model or self.adapter is not None:
            return model or None
        if self.uses_lora_weight_sync:
            raise ConfigError(
                "LoRA is enabled, and the request names no model: it would get the base weights",
                hint="give the adapter's name as model, or make the client with adapter=",
            )
        return self.model_name


def _request(prompt: Sequence[int], sampling: Mapping[str, Any], index: int) -> GenerationRequest:
    """Return the request for a prompt with vLLM's ``sampling_params``."""
    more = {name: value for name, value in sampling.items() if value is not None}
    known = {name: more.pop(name) for name in ("max_tokens", "temperature", "seed") if name in more}
    logprobs = more.pop("logprobs", None) is not None
    stops = tuple(more.pop("stop_token_ids", ()))
    ids = checked_prompt(prompt, index)
    return GenerationRequest(token_ids=ids, logprobs=logprobs, stop_token_ids=stops, more=more, **known)
