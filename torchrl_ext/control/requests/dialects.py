"""Translate generation requests and answers between this library and each kind of engine's JSON."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torchrl_ext.base.types import Info
from torchrl_ext.control.requests.generation import Generation, GenerationRequest, VersionSpan

__all__ = ["Dialect", "SGLangDialect", "VLLMDialect"]


class Dialect(ABC):
    """Translates between `GenerationRequest`, `Generation` and the JSON of one kind of engine.

    Attributes:
        route: the route that generates.
        one_seed_per_request: whether one seed makes all continuations equal, so that each needs its own request.
    """

    route: ClassVar[str]
    one_seed_per_request: ClassVar[bool] = False

    @abstractmethod
    def body(self, request: GenerationRequest) -> Info:
        """Return the ``POST`` body for `route`."""

    @abstractmethod
    def read(self, answer: Any) -> list[Generation]:
        """Return the continuations in an answer, in order.

        Raises:
            KeyError, TypeError, IndexError: the answer has another form.
        """


class VLLMDialect(Dialect):
    """Uses vLLM's token-in, token-out route (`vllm.entrypoints.scale_out`), which embedded engines also serve."""

    route: ClassVar[str] = "/inference/v1/generate"

    def body(self, request: GenerationRequest) -> Info:
        sampling = {
            "n": request.n,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            **request.more,
        }
        sampling |= {"logprobs": 0} if request.logprobs else {}
        sampling |= {"stop_token_ids": list(request.stop_token_ids)} if request.stop_token_ids else {}
        sampling |= {} if request.seed is None else {"seed": request.seed}
        fields = {"token_ids": list(request.token_ids), "sampling_params": sampling}
        fields |= {} if request.adapter is None else {"model": request.adapter}
        return fields | ({} if request.cache_key is None else {"cache_salt": request.cache_key})

    def read(self, answer: Any) -> list[Generation]:
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


class SGLangDialect(Dialect):
    """Uses SGLang's native route (`sglang.srt.managers.io_struct.GenerateReqInput`).

    Each request has one prompt and one map of sampling settings, because routers answer lists of either with 422. Seeds
    take effect only where the server runs with ``--enable-deterministic-inference``. SGLang's router (0.3.2) forwards
    all these fields; vLLM's (0.1.17) drops ``sampling_seed`` and ``min_new_tokens``.
    """

    route: ClassVar[str] = "/generate"
    one_seed_per_request: ClassVar[bool] = True

    _NAMES: ClassVar[dict[str, str]] = {"min_tokens": "min_new_tokens"}

    def body(self, request: GenerationRequest) -> Info:
        more = {self._NAMES.get(name, name): value for name, value in request.more.items()}
        sampling = {"max_new_tokens": request.max_tokens, "temperature": request.temperature, **more}
        sampling |= {"stop_token_ids": list(request.stop_token_ids)} if request.stop_token_ids else {}
        sampling |= {} if request.seed is None else {"sampling_seed": request.seed}
        sampling |= {} if request.n == 1 else {"n": request.n}
        fields = {"input_ids": list(request.token_ids), "sampling_params": sampling, "return_logprob": request.logprobs}
        fields |= {} if request.adapter is None else {"lora_path": request.adapter}
        return fields | ({} if request.cache_key is None else {"extra_key": request.cache_key})

    def read(self, answer: Any) -> list[Generation]:
        return [self._read(row) for row in ([answer] if isinstance(answer, dict) else answer)]

    def _read(self, row: Any) -> Generation:
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
