"""`RemoteLLMPolicy`: a TorchRL policy whose tokens come from running engines over HTTP."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from tensordict import LazyStackedTensorDict, TensorDictBase, lazy_stack, set_list_to_stack
from torchrl.modules.llm.policies import LLMWrapperBase

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.control.requests.client import InferenceClient
from torchrl_ext.rl.policy.records import Prompts, read_prompts, write_records
from torchrl_ext.rl.policy.settings import WrapperSettings, sampling_settings

__all__ = ["RemoteLLMPolicy"]

_CONVERSATIONS = 1 << 16  # that are remembered


class RemoteLLMPolicy(LLMWrapperBase):  # type: ignore[misc]  # torchrl has no types
    """Generates with vLLM, SGLang or embedded engines; a policy for `LLMCollector` with external engines.

    It reads and writes the keys of TorchRL's wrappers (`vLLMWrapper`, `TransformersWrapper`). For each sequence of P
    prompt tokens and R response tokens it writes

    * ``tokens``: `Tokens` with ``prompt`` (P), ``response`` (R) and ``full`` (P + R), int64;
    * ``masks``: `Masks` with ``all_attention_mask`` and ``all_assistant_mask`` (P + R), bool;
    * ``log_probs``: `LogProbs` with ``response`` (R) and ``full`` (P + R, NaN over the prompt), float32;
    * ``text`` in text and history modes, ``history`` in history mode;

    and two keys of ours, which are not in ``out_keys`` (these are the wrappers', in the same order),

    * ``token_versions``: ``response`` (R) and ``full`` (P + R), int64: version of the weights that sampled each token,
      from the engine's ``weight_versions``; 0 for an engine's initial weights, -1 over the prompt and padding and where
      an engine reports none;
    * ``response_truncated``, bool: the token limit ended the response, not the model. (If an engine aborts a response,
      it continues until one of the two ends it.)

    Several engines share the requests, see `InferenceClient`. Servers batch their requests, so this class does not; it
    is thread-safe.

    Args:
        model: addresses of engines, or an `InferenceClient`.
        seed: sequence k of this policy is sampled with ``seed + k``; None leaves it to the engines.
        version: returns the trainer's newest version, like ``lambda: sender.version``; picklable where the policy is.
            With it, engines reuse keys and values by version, as ``cache_versions`` of `InferenceClient.generate` says,
            and later turns of a conversation (history mode) keep the version of its first turn.
        timeout_s: deadline of one call, in seconds; None takes the client's.
        wrapper: fields of `WrapperSettings`, under TorchRL's names.

    Raises:
        ConfigError: invalid settings.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl.modules.llm.policies import Tokens
        >>> policy = tx.RemoteLLMPolicy(address, input_mode="tokens", generate_kwargs={"max_new_tokens": 4})
        >>> prompt = Tokens(prompt=torch.tensor([[1, 2, 3]]), batch_size=1)
        >>> answer = policy(TensorDict({"tokens": prompt}, batch_size=1))
        >>> answer["tokens", "response"].shape, answer["token_versions", "response"].tolist()
        (torch.Size([1, 4]), [[0, 0, 0, 0]])
    """

    _min_batch_size = _max_batch_size = None  # TorchRL's `batching` reads them

    def __init__(
        self,
        model: InferenceClient | str | Sequence[str],
        *,
        seed: int | None = None,
        version: Callable[[], int] | None = None,
        timeout_s: float | None = None,
        **wrapper: Any,
    ) -> None:
        super().__init__()
        self._given = {**wrapper, "seed": seed, "version": version, "timeout_s": timeout_s}
        given = WrapperSettings(**wrapper)
        if isinstance(model, InferenceClient):
            self.model = model
        else:
            self.model = InferenceClient.connect(*([model] if isinstance(model, str) else model))
        self._settings, self.layout, self._device = given, None, given.device
        for name in ("tokenizer", "generate", "input_mode", "input_key", "pad_output", "padding_value"):
            setattr(self, name, getattr(given, name))
        for name in ("prefer_tokens", "history_key", "text_key", "tokens_key", "masks_key", "log_probs_key"):
            setattr(self, name, getattr(given, name))
        self.generate_kwargs, self.num_samples = dict(given.generate_kwargs or {}), given.num_samples
        _, self.num_samples = self._sampled({})
        if self.num_samples is not None and given.inplace in (True, "empty"):
            what = f"inplace={given.inplace!r} cannot hold several samples per prompt"
            raise ConfigError(what, expected="False or None")
        self.inplace = given.inplace if given.inplace is not None else self.num_samples is None
        for name in ("tokens", "masks", "log_probs", "text", "history"):
            setattr(self, f"return_{name}", name in given.keys)
        self._keys = given.keys | {"versions": "token_versions", "truncated": "response_truncated"}
        self.in_keys, self.out_keys = [given.input_key], list(given.keys.values())
        self._seed, self._timeout_s = seed, timeout_s
        self._made, self._counting = 0, threading.Lock()
        self._newest = version
        self._first: dict[int, int] = {}  # version at the first turn, by what a conversation said until its last answer

    @property
    def sampling_params(self) -> SimpleNamespace:
        """The sampling settings of requests under vLLM's names, with ``n`` continuations per prompt."""
        return SimpleNamespace(n=self.num_samples or 1, **self._sampled({})[0])

    def get_new_version(self, **kwargs: Any) -> RemoteLLMPolicy:
        """Return a policy with other settings on the same engines."""
        return type(self)(**{"model": self.model, **self._given, **kwargs})

    def __reduce__(self) -> tuple[Any, ...]:
        """Make a policy in another process that uses the same engines and counts its seeds from the start."""
        return functools.partial(type(self), self.model, **self._given), ()

    @set_list_to_stack(True)  # type: ignore[untyped-decorator]  # tensordict leaves it so
    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        tensordict_out: TensorDictBase | None = None,
        logits_only: bool = False,
        **kwargs: Any,
    ) -> TensorDictBase:
        """Continue the prompts of ``tensordict``.

        Args:
            tensordict: any batch size; prompts under the input key.
            tensordict_out: where to write; if omitted, ``inplace`` decides.
            logits_only: must be False, because engines return no logits.
            kwargs: sampling settings that override the constructor's.

        Raises:
            ConfigError: the prompts are missing, or a sampling setting is invalid.
            EngineUnreachableError, EngineRefusedError: no engine took a prompt.
            DeadlineError: the engines did not answer in time.
        """
        if logits_only:
            raise ConfigError("engines return tokens and their log-probabilities, not logits")
        if tensordict.ndim == 0:
            return self.forward(lazy_stack([tensordict]), **kwargs)[0]
        if tensordict.ndim > 1:
            out = self.forward(tensordict.reshape(-1), **kwargs)
            return out.view(*tensordict.shape, *out.shape[1:])
        source = tensordict if isinstance(tensordict, LazyStackedTensorDict) else tensordict.to_lazystack(0)
        found = self._generate(source.copy().clear_device_() if source.device else source, kwargs)
        if self._device or tensordict.device:
            found = found.to(self._device or tensordict.device)
        if tensordict_out is None and self.inplace is False:
            return found
        target = tensordict_out
        if target is None:
            target = tensordict.empty() if self.inplace == "empty" else tensordict
        written = list(self._keys.values())
        return target.exclude(*written, inplace=True).update(found, keys_to_update=written)

    def _generate(self, tensordict: LazyStackedTensorDict, changes: Mapping[str, Any]) -> LazyStackedTensorDict:
        prompts = read_prompts(tensordict, self._settings)
        sampling, samples = self._sampled(changes)
        count = len(prompts.tokens) * (samples or 1)
        if self._seed is not None:
            with self._counting:
                sampling["seed"], self._made = self._seed + self._made, self._made + count
        versions = None if self._newest is None else self._first_versions(prompts, self._newest())
        generations = self.model.generate(
            prompts.tokens,
            n=samples or 1,
            logprobs=self.return_log_probs,
            cache_versions=versions,
            timeout_s=self._timeout_s,
            **sampling,
        )
        found = write_records(prompts, generations, samples, self._settings, self._keys)
        if versions is not None and self.return_history:
            answered = [row.get((self._keys["history"], "full")) for row in found.reshape(-1).unbind(0)]
            self._remember(answered, [one for one in versions for _ in range(samples or 1)])
        return found

    def _first_versions(self, prompts: Prompts, newest: int) -> list[int]:
        """Return the version at the first turn of each prompt's conversation; ``newest`` where it begins now."""
        if prompts.history is None:
            return [newest] * len(prompts.tokens)
        return [self._first.get(_said(history), newest) for history in prompts.history.unbind(0)]

    def _remember(self, histories: Sequence[Any], versions: Sequence[int]) -> None:
        with self._counting:
            for said, version in zip(map(_said, histories), versions, strict=True):
                self._first[said] = max(version, self._first.pop(said, version))  # two conversations may say the same
            while len(self._first) > _CONVERSATIONS:
                del self._first[next(iter(self._first))]

    def _sampled(self, changes: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
        """Return the arguments of `InferenceClient.generate` for TorchRL's settings, and the number of samples."""
        given = self._standardize_generate_kwargs({**self.generate_kwargs, **changes})
        return sampling_settings(given, self.num_samples)


def _said(history: Any) -> int:
    """Return a hash of a conversation's messages up to its last answer; before the first answer, of none."""
    messages = [(str(one.role), str(one.content)) for one in history.unbind(0)]
    answers = [i for i, (role, _) in enumerate(messages, start=1) if role == "assistant"]
    return hash(tuple(messages[: answers[-1]])) if answers else hash(())
