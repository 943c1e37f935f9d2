"""A client with the names and shapes of SkyRL's: token requests through a router, control calls to every engine.

The split, the names, inputs and outputs are those of SkyRL's "Inference Architecture" page. In addition, `generate`
returns the weight version of each token, and generations that an engine aborted continue.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import Any, TypeVar

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.base.registry import engines
from torchrl_ext.base.types import Info
from torchrl_ext.control.fleet import Fleet
from torchrl_ext.control.http import each, normalise_urls, run
from torchrl_ext.control.requests.client import InferenceClient
from torchrl_ext.control.requests.generation import Generation, GenerationRequest, checked_prompt

__all__ = ["PauseMode", "RemoteInferenceClient"]

_T = TypeVar("_T")
_CONCURRENCY = "SKYRL_GENERATE_CONCURRENCY_PER_ENGINE"
_SAMPLING = {
    **{name: name for name in ("temperature", "max_tokens", "seed", "top_k", "top_p")},
    **{"stop_strings": "stop", "stop_tokens": "stop_token_ids"},
}
"""Sampling settings of `RemoteInferenceClient.sample` -> vLLM's."""


class PauseMode(str, Enum):
    """What a pause does to running requests: see `RemoteInferenceClient.pause`."""

    ABORT = "abort"
    KEEP = "keep"
    WAIT = "wait"


@dataclass(kw_only=True)
class RemoteInferenceClient:
    """Sends requests to a router and control calls to the engines behind it; picklable.

    Methods are coroutines that work in any event loop; `run` calls one from synchronous code.

    A call for tokens or text is retried until its deadline, unless an engine refuses the request. It raises
    EngineUnreachableError, EngineRefusedError or DeadlineError if no usable answer arrives.

    A control call goes to all engines at the same time, waits for every one, and returns ``{url: {"status", "body"}}``.
    It raises EngineError if it failed on an engine (of several, each has a row), ConfigError if one is a router.

    The four steps of an update use vLLM's own routes; the caller provides what the trainer's transport says.

    Attributes:
        proxy_url: base address of the router (or of the only engine), for token requests.
        server_urls: base address of every engine, for control calls.
        kind: ``"vllm"``, ``"sglang"`` or ``"embedded"``. SGLang's router has no routes that turn text into tokens and
            back, so its engines are asked directly.
        model_name: ``model`` of requests; None leaves it to the engine.
        api_key: sent as a bearer token; see `torchrl_ext.control.http.HTTPSession` for several.
        concurrency_per_engine: maximum requests in flight per engine, over all calls; 0 for no limit. None takes
            ``SKYRL_GENERATE_CONCURRENCY_PER_ENGINE`` from the environment, or 512.
        timeout_s: deadline of a call for tokens, for all its prompts together, in seconds.
        control_timeout_s: deadline of a control call, in seconds.

    Raises:
        ConfigError: invalid addresses or numbers.
    """

    proxy_url: str
    server_urls: Sequence[str]
    kind: str = "vllm"
    model_name: str | None = None
    api_key: str | tuple[str, ...] | None = field(default=None, repr=False)
    concurrency_per_engine: int | None = None
    timeout_s: float = 1800.0
    control_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        given = self.concurrency_per_engine
        limit = os.environ.get(_CONCURRENCY, "512") if given is None else str(given)
        if not limit.isdecimal():
            name = f"{_CONCURRENCY} in the environment" if given is None else "concurrency_per_engine"
            raise ConfigError(f"{name} is {limit!r}", expected="a whole number, at least 0")
        self.server_urls = tuple(normalise_urls(self.server_urls))
        (self.proxy_url,) = normalise_urls([self.proxy_url])
        if self.proxy_url in self.server_urls and len(self.server_urls) > 1:
            what = f"proxy_url {self.proxy_url} is one of several server_urls, so that the others would get no requests"
            raise ConfigError(what, expected="the address of the router in front of them")
        how: dict[str, Any] = {"kind": self.kind, "api_key": self.api_key, "retire_s": 0.0, "persistent": True}
        total = int(limit) * len(self.server_urls)
        self._requests = self._text = InferenceClient(self.proxy_url, max_concurrency=total, **how)
        if self.kind == "sglang":
            self._text = InferenceClient(self.server_urls, max_concurrency=int(limit), **how)

    def run(self, call: Coroutine[Any, Any, _T]) -> _T:
        """Await a call, ``client.run(client.pause())``; ConfigError in a coroutine that `run` awaits: a deadlock."""
        return run(call)

    def __reduce__(self) -> tuple[Any, ...]:
        given = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return functools.partial(type(self), **given), ()

    # tokens

    async def generate(self, input_batch: Mapping[str, Any], model: str | None = None) -> Info:
        """Continue prompts, with one request per prompt.

        Args:
            input_batch: ``prompt_token_ids`` (token ids per prompt), ``sampling_params`` (vLLM's names; ``n`` is 1);
                optionally ``session_ids`` (one per prompt: prompts of one session stay on one engine).
            model: replaces ``model_name``.

        Returns:
            Lists with one entry per prompt: ``responses`` (text; None from embedded engines),
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
        return {
            "responses": await self.detokenize([one.token_ids for one in found]) if self.kind != "embedded" else None,
            "response_ids": [list(one.token_ids) for one in found],
            "stop_reasons": [one.finish_reason for one in found],
            "response_logprobs": None if sampling.get("logprobs") is None else [list(one.logprobs) for one in found],
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
        """Request a chat completion over ``/v1/chat/completions``.

        Args:
            request_payload: ``{"json": body}``; ``session_id`` in the body selects the engine and is not forwarded.

        Returns:
            The engine's answer; one that a pause ended has the finish reason ``"abort"``.
        """
        return await self._post(self._requests, "/v1/chat/completions", request_payload.get("json"))

    async def completion(self, request_payload: Mapping[str, Any]) -> Info:
        """Request a text completion over ``/v1/completions``; otherwise like `chat_completion`."""
        return await self._post(self._requests, "/v1/completions", request_payload.get("json"))

    async def render(self, request_payload: Mapping[str, Any]) -> Any:
        """Return vLLM's rendering of a chat, with its token ids; the payload is as for `chat_completion`."""
        return await self._post(self._requests, "/v1/chat/completions/render", request_payload.get("json"))

    async def tokenize(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text, from an engine."""
        bodies = [{"prompt": one, "add_special_tokens": add_special_tokens} for one in texts]
        return [answer["tokens"] for answer in await each([self._post(self._text, "/tokenize", one) for one in bodies])]

    async def detokenize(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each list of token ids, from an engine."""
        answers = await each([self._post(self._text, "/detokenize", {"tokens": list(ids)}) for ids in token_ids])
        return [answer.get("prompt", answer.get("text")) for answer in answers]

    # control

    async def pause(self, mode: PauseMode | str = "keep", clear_cache: bool = False) -> dict[str, Info]:
        """Pause every engine.

        Args:
            mode: ``keep`` freezes running requests, ``wait`` lets them finish, ``abort`` ends them (`generate` and
                `sample` then request the rest once an engine serves again).
            clear_cache: drop the prefix cache as well.

        Returns:
            By address; the body has a ``status``, one of the states of `torchrl_ext.base.reports.EngineRow`. `resume`,
            `sleep` and `wake_up` return the same.

        Raises:
            ConfigError: unknown mode.
        """
        paused = await self._state_after("pause", "paused", lambda engine: engine.pause(), pause_mode=mode.lower())
        if clear_cache:
            await self.reset_prefix_cache()
        return paused

    async def resume(self) -> dict[str, Info]:
        """Resume generation on every engine; one that sleeps without weights, or holds half an update, refuses."""
        return await self._state_after("resume", "serving", lambda engine: engine.resume())

    async def sleep(self, level: int = 2, tags: Sequence[str] | None = None) -> dict[str, Info]:
        """Make every engine release its device memory; see `torchrl_ext.control.client.EngineClient.sleep`."""
        return await self._state_after("sleep", "paused", lambda engine: engine.sleep(level, tags))

    async def wake_up(self, tags: Sequence[str] | None = None) -> dict[str, Info]:
        """Make every engine restore its device memory; one that is fully awake serves again.

        Args:
            tags: ``["weights"]`` or ``["kv_cache"]``; None for everything.
        """
        return await self._state_after("wake up", "", lambda engine: engine.wake_up(tags))

    async def reset_prefix_cache(self) -> dict[str, Info]:
        """Make every engine drop its cached keys and values; running requests compute theirs again."""
        return await self._everywhere("drop its cache", lambda engine: engine.port.drop_cached())

    # the steps of an update

    async def init_weight_update_communicator(self, init_info: Any) -> dict[str, Info]:
        """Call vLLM's ``/init_weight_transfer_engine`` on every engine, each with its own rank offset.

        Args:
            init_info: JSON-safe mapping, or a dataclass; its ``rank_offset`` (default 1) is the first engine's.
        """
        info, sizes = _plain(init_info), await self._everywhere("tell its size", lambda one: one.info().world_size)
        firsts = accumulate((size["body"] for size in sizes.values()), initial=info.get("rank_offset", 1))
        init_infos = {
            url: {"init_info": {**info, "rank_offset": rank}} for url, rank in zip(sizes, firsts, strict=False)
        }
        return await self._step("join the transport", "/init_weight_transfer_engine", init_infos.get)

    async def start_weight_update(self) -> dict[str, Info]:
        """Call vLLM's ``/start_weight_update`` on every engine."""
        return await self._step("start the update", "/start_weight_update", lambda url: None)

    async def update_named_weights(self, update_info: Any) -> dict[str, Info]:
        """Call vLLM's ``/update_weights`` on every engine, for one chunk of an update, while the trainer sends it.

        Args:
            update_info: JSON-safe mapping, or a dataclass.
        """
        body = {"update_info": _plain(update_info)}
        return await self._step("load", "/update_weights", lambda url: body)

    async def finish_weight_update(self, weight_version: int | str | None = None) -> dict[str, Info]:
        """Call vLLM's ``/finish_weight_update`` on every engine; the version, if given, labels its weights."""
        body = {} if weight_version is None else {"weight_version": str(weight_version)}
        return await self._step("finish the update", "/finish_weight_update", lambda url: body)

    # helpers

    def _request(
        self, prompt: Sequence[int], index: int, sampling: Mapping[str, Any], session_id: Any, model: str | None
    ) -> GenerationRequest:
        """Return the request for a prompt from vLLM's ``sampling_params``."""
        more = {name: value for name, value in sampling.items() if value is not None}
        known = {name: more.pop(name) for name in ("max_tokens", "temperature", "seed") if name in more}
        return GenerationRequest(
            token_ids=checked_prompt(prompt, index),
            logprobs=more.pop("logprobs", None) is not None,
            stop_token_ids=tuple(more.pop("stop_token_ids", ())),
            more=more,
            adapter=None if self.kind == "sglang" else model or self.model_name,  # SGLang has one model
            session_id=session_id,
            **known,
        )

    async def _generated(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        return await self._requests.generations(requests, time.monotonic() + self.timeout_s)

    async def _post(self, over: InferenceClient, route: str, given: Mapping[str, Any] | None) -> Any:
        body = {**({} if self.model_name is None else {"model": self.model_name}), **(given or {})}
        return await over.post(route, body, body.pop("session_id", None), time.monotonic() + self.timeout_s)

    async def _step(self, what: str, route: str, body: Callable[[str], Info | None]) -> dict[str, Info]:
        """Run a step of an update; ``body`` takes an address."""
        how = {"timeout_s": self.control_timeout_s}
        return await self._everywhere(what, lambda one: one.port.http.post(route, body(one.url), **how))

    async def _state_after(
        self, what: str, state: str, call: Callable[[Any], object], **settings: Any
    ) -> dict[str, Info]:
        """Make a call that leads to ``state``; "" asks."""

        def called(engine: Any) -> Info:
            call(engine)
            return {"status": state or engine.look()[0].state}

        return await self._everywhere(what, called, **settings)

    async def _everywhere(self, what: str, call: Callable[[Any], Any], **settings: Any) -> dict[str, Info]:
        """Return the result of ``call`` for each engine's client, which has ``settings``, by address."""
        settings |= {"api_key": self.api_key, "load_timeout_s": self.control_timeout_s}

        def called() -> list[Any]:
            with Fleet([engines.make(self.kind, url=url, **settings) for url in self.server_urls]) as fleet:
                return fleet.everywhere(what, call)

        found = await asyncio.to_thread(called)
        return {url: {"status": 200, "body": body or {}} for url, body in zip(self.server_urls, found, strict=True)}


def _plain(info: Any) -> Info:
    return dict(info) if isinstance(info, Mapping) else dataclasses.asdict(info)
