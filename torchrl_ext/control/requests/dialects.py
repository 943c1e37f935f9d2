"""How each make of engine wants a request for tokens, and how it answers.

vLLM's is its token-in, token-out route (`vllm.entrypoints.scale_out`), which embedded engines also serve.

SGLang's is its native route (`sglang.srt.managers.io_struct.GenerateReqInput`), with one prompt and one map of sampling
settings per request, because routers answer lists of either with 422. Seeds take effect only where the server runs with
``--enable-deterministic-inference``. SGLang's router (0.3.2) forwards all these fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_ext.base.types import Info
from torchrl_ext.control.requests.generation import Generation, GenerationRequest, VersionSpan

__all__ = ["Dialect", "SGLangDialect", "VLLMDialect"]


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The words of one make of engine.

    Attributes:
        route: the route that generates.
        ask: returns the ``POST`` body for a `GenerationRequest`.
        read: returns the continuations in an answer, in order; raises KeyError, TypeError, IndexError, ValueError or
            AttributeError if the answer has another form.
        one_seed_per_request: whether one seed makes all continuations equal, so that each needs its own request.
    """

    route: str
    ask: Callable[[GenerationRequest], Info]
    read: Callable[[Any], list[Generation]]
    one_seed_per_request: bool = False


def _ask_vllm(request: GenerationRequest) -> Info:
    sampling = {"n": request.n, "max_tokens": request.max_tokens, "temperature": request.temperature, **request.more}
    sampling |= {"logprobs": 0} if request.logprobs else {}
    sampling |= {"stop_token_ids": list(request.stop_token_ids)} if request.stop_token_ids else {}
    sampling |= {} if request.seed is None else {"seed": request.seed}
    fields = {"token_ids": list(request.token_ids), "sampling_params": sampling}
    fields |= {} if request.adapter is None else {"model": request.adapter}
    return fields | ({} if request.cache_key is None else {"cache_salt": request.cache_key})


def _read_vllm(answer: Any) -> list[Generation]:
    rows = enumerate(answer["choices"])
    choices = [choice for _, choice in sorted(rows, key=lambda row: row[1].get("index", row[0]))]
    return [
        Generation(
            token_ids=tuple(choice["token_ids"] or ()),
            logprobs=tuple(entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or ()),
            finish_reason=choice["finish_reason"],
            weight_versions=_spans(choice.get("weight_versions")),
        )
        for choice in choices
    ]


def _ask_sglang(request: GenerationRequest) -> Info:
    more = dict(request.more)
    more |= {"min_new_tokens": more.pop("min_tokens")} if "min_tokens" in more else {}
    sampling = {"max_new_tokens": request.max_tokens, "temperature": request.temperature, **more}
    sampling |= {"stop_token_ids": list(request.stop_token_ids)} if request.stop_token_ids else {}
    sampling |= {} if request.seed is None else {"sampling_seed": request.seed}
    sampling |= {} if request.n == 1 else {"n": request.n}
    fields = {"input_ids": list(request.token_ids), "sampling_params": sampling, "return_logprob": request.logprobs}
    fields |= {} if request.adapter is None else {"lora_path": request.adapter}
    return fields | ({} if request.cache_key is None else {"extra_key": request.cache_key})


def _read_sglang(answer: Any) -> list[Generation]:
    return [_read_row(row) for row in ([answer] if isinstance(answer, dict) else answer)]


def _read_row(row: Any) -> Generation:
    meta, tokens = row["meta_info"], tuple(row["output_ids"])
    spans = meta.get("weight_versions")
    if not spans and "weight_version" in meta:  # servers without spans report only the last version
        spans = [{"version": meta["weight_version"], "start": 0, "end": len(tokens)}]
    return Generation(
        token_ids=tokens,
        logprobs=tuple(entry[0] for entry in meta.get("output_token_logprobs") or ()),
        finish_reason=meta["finish_reason"]["type"],
        weight_versions=_spans(spans),
    )


def _spans(rows: Sequence[Info] | None) -> tuple[VersionSpan, ...]:
    """Return the spans in ``weight_versions``, which vLLM and SGLang report in the same form."""
    return tuple(VersionSpan(version=str(row["version"]), start=row["start"], end=row["end"]) for row in rows or ())


VLLMDialect = Dialect(route="/inference/v1/generate", ask=_ask_vllm, read=_read_vllm)
SGLangDialect = Dialect(route="/generate", ask=_ask_sglang, read=_read_sglang, one_seed_per_request=True)
