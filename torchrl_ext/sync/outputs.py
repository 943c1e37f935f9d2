"""`Outputs` compares each engine's log-probabilities of a few tokens with the trainer's, as the proof of an update.

Digests show that the right bytes arrived; only outputs show whether the engine computes the right thing with them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from torchrl_ext.base.errors import ConfigError, EngineError, EngineUnreachableError, WeightSyncError
from torchrl_ext.base.reports import PROOFS, EngineRow, Spans
from torchrl_ext.base.types import Info, ParamMeta
from torchrl_ext.control.client import EngineClient
from torchrl_ext.data.weights.source import inner_model

__all__ = ["Compute", "Outputs", "Probe", "bound_of", "gaps", "random_prompts"]

log = logging.getLogger("torchrl_ext")

Compute = Callable[[Sequence[Sequence[int]]], Iterable[Any]]
"""Prompts -> per prompt a tensor or a list: natural-log probability of each token after the first."""

Prompts = tuple[tuple[int, ...], ...]
Reference = tuple[Prompts, list[list[float]]]
"""Prompts, and the trainer's log-probabilities of them."""

_BOUNDS: Final = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 1.0}
_QUANTISED: Final = 2.0


def bound_of(params: Iterable[ParamMeta]) -> float:
    """Return the gap, in nats, up to which engine and trainer agree, by the coarsest dtype among ``params`` as sent.

    1e-3 for float32, where two implementations of one model were seen to differ by some 1e-6. 0.1 for float16 and 1.0
    for bfloat16: logits of 16 to 32 are 0.016 and 0.125 apart there, and what layers round adds to it (seen on small
    models with logits up to 60: 0.06 and 0.41). 2.0 for anything narrower, which is a guess. Other weights of the same
    model are several nats away; one small step of an optimizer is not seen in half precision, whatever the bound.
    """
    dtypes = {meta.dtype for meta in params if meta.dtype.is_floating_point}
    return max((_BOUNDS.get(dtype, _QUANTISED) for dtype in dtypes), default=_QUANTISED)


def random_prompts(vocabulary: int, *, sequences: int = 2, tokens: int = 16, seed: int = 0) -> Prompts:
    """Draw ``sequences`` prompts of ``tokens`` token ids below ``vocabulary``; the same for the same arguments.

    Most random tokens are improbable, so that not only the best token's probability is compared. 16 are too few
    for a block of vLLM's prefix cache, whose last token is always computed anew.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(vocabulary, (sequences, tokens), generator=generator)
    return tuple(tuple(row) for row in drawn.tolist())


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The prompts that engine and trainer are both asked about, and the function that answers for the trainer.

    Attributes:
        prompts: token ids, at least two per prompt; None draws `random_prompts` for the registered model's vocabulary.
        compute: the trainer's own log-probabilities; None runs the registered model (`score`). Every trainer rank calls
            it once per update, before the weights are gathered, so that it may run a sharded model.

    Raises:
        ConfigError: there is no prompt, or one of fewer than two token ids.
    """

    prompts: Prompts | None = None
    compute: Compute | None = None

    def __post_init__(self) -> None:
        if self.prompts is not None and (not self.prompts or min(map(len, self.prompts)) < 2):
            raise ConfigError("a probe needs prompts of at least two token ids", expected="such as ((17, 3, 42),)")

    def trainer(self, model: Any) -> Reference:
        """Return the prompts, and the trainer's log-probabilities of them.

        Raises:
            ConfigError: neither a function nor a model computes them, or the function returns too many or too few.
        """
        prompts = self.prompts or random_prompts(_vocabulary(model))
        if self.compute is None:
            return prompts, score(model, prompts)
        found = [torch.as_tensor(row, dtype=torch.float64).tolist() for row in self.compute(prompts)]
        if [len(row) for row in found] != [len(prompt) - 1 for prompt in prompts]:
            raise ConfigError(
                f"the probe's function returned {[len(row) for row in found]} log-probabilities",
                expected=f"{[len(prompt) - 1 for prompt in prompts]}: one for each token after the first",
            )
        return prompts, found


def gaps(trainer: Sequence[Sequence[float]], engine: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the largest and the mean absolute difference, in nats; a difference that is NaN counts as infinite.

    Args:
        trainer, engine: per prompt the log-probability of each token after the first.

    Raises:
        ConfigError: they are not of the same lengths.
    """
    if [len(row) for row in trainer] != [len(row) for row in engine]:
        raise ConfigError(
            f"the engine returned {[len(row) for row in engine]} log-probabilities",
            expected=f"{[len(row) for row in trainer]}, as the trainer",
        )
    found = [abs(a - b) for row, other in zip(trainer, engine, strict=True) for a, b in zip(row, other, strict=True)]
    found = [math.inf if math.isnan(gap) else gap for gap in found]
    return max(found), sum(found) / len(found)


class Outputs:
    """Compares the outputs of a sender's engines with the trainer's after each update.

    Args:
        max_gap: largest accepted gap, in nats; ``"dtype"`` takes `bound_of` the update's parameters, and None only
            reports.
        probe: the prompts, and the trainer's side; a callable stands for ``Probe(compute=callable)``.

    Attributes:
        spans: ``{"probe": seconds}`` of the newest update, both sides together.

    Raises:
        ConfigError: settings that cannot work.
    """

    def __init__(self, max_gap: float | str | None, probe: Probe | Compute | None) -> None:
        if max_gap is not None and max_gap != "dtype" and (isinstance(max_gap, str) or not max_gap >= 0):
            raise ConfigError(f"max_gap cannot be {max_gap!r}", expected="at least 0 nats, None or 'dtype'")
        self._max_gap = max_gap
        self._probe = probe if isinstance(probe, Probe) else Probe(compute=probe)
        self._found: dict[str, Info] = {}
        self._reference: tuple[Reference, float | None] = ((), []), None  # of the update that is under way
        self.spans = Spans()

    @classmethod
    def wanted(cls, verify: bool | str, max_gap: float | str | None, probe: Probe | Compute | None) -> Outputs | None:
        """Return the `Outputs` that `WeightSender`'s settings ask for; None if no outputs are compared.

        Raises:
            ConfigError: settings that cannot work, or that would have no effect.
        """
        if verify not in (True, False, "outputs"):
            raise ConfigError(f"verify cannot be {verify!r}", expected="True, False or 'outputs'")
        if verify != "outputs" and (probe is not None or max_gap != "dtype"):
            raise ConfigError("max_gap and probe are about outputs, which are not compared", hint="verify='outputs'")
        return cls(max_gap, probe) if verify == "outputs" else None

    def asked(self, weights: Any, model: Any) -> Reference:
        """Return the prompts, and the trainer's log-probabilities of them, for one update.

        Every rank calls this first: a failure of one rank before it would leave the others in the forward pass.

        Args:
            weights, model: what the caller wants sent (or None), and the registered model; the first of them that is a
                module is the trainer's side, where the probe has no function of its own.

        Raises:
            ConfigError: the trainer's side computes no log-probabilities; no engine was touched.
        """
        began = time.perf_counter()
        candidates = (inner_model(candidate) for candidate in (weights, model))
        reference = self._probe.trainer(next((one for one in candidates if isinstance(one, nn.Module)), None))
        self.spans = Spans()
        self.spans.since("probe", began)
        return reference

    @contextmanager
    def compared(
        self, engine: EngineClient, rows: Callable[[], Iterable[EngineRow]], source: Any, reference: Reference
    ) -> Iterator[None]:
        """Return a context for one update that asks the engines when the update ends.

        Every engine that serves the version is asked, also when the update failed for others. One that is beyond the
        bound, or gives no answer, is paused.

        Args:
            engine: the sender's.
            rows: returns the engines' rows, as of now.
            source: the update's `torchrl_ext.data.update_source.UpdateSource`; its version is read when that is over.
            reference: what `asked` returned for this update.

        Raises:
            ConfigError: the engine computes no log-probabilities; no engine was touched.
            EngineError: engines are beyond the bound, or gave no answer; not where the update failed already.
        """
        self._found = {}
        began = time.perf_counter()
        for one in engine.each():
            one.logprobs(())  # raises where it cannot compute any, before it takes the version
        bound = bound_of(source.params()) if isinstance(self._max_gap, str) else self._max_gap
        self._reference = reference, bound
        self.spans.since("probe", began)
        try:
            yield
        except Exception:  # the rows of the report say how far off the engines are that serve the version
            self._compare_all(engine, rows(), source.version)
            raise
        self._compare_all(engine, rows(), source.version)
        failed = {name: found["error"] for name, found in self._found.items() if "error" in found}
        if failed and bound is not None:
            raise EngineError(
                "; ".join(failed.values()),
                expected=f"log-probabilities within {bound:g} of the trainer's",
                state=f"{', '.join(failed)}: paused with the new weights, or unreachable",
                hint="compare what may differ in the engine (quantisation, configuration, kernels), or raise "
                "max_gap; the next successful update resumes it",
            )

    def canary(self, engine: EngineClient) -> None:
        """Ask one engine in the midst of an update, and do not pause it.

        Raises:
            EngineError: it is beyond the bound, or gave no answer.
        """
        began = time.perf_counter()
        found = _gaps(engine, *self._reference)
        self.spans.since("probe", began)
        if "error" in found and self._reference[1] is not None:
            raise EngineError(
                found["error"], expected=f"log-probabilities within {self._reference[1]:g} of the trainer's"
            )
        self._found[engine.url] = found

    def noted(self, rows: Iterable[EngineRow]) -> list[EngineRow]:
        """Return a report's rows with the engines' gaps, and the proof ``"outputs"`` of each within the bound."""
        return [replace(row, **self._found.get(row.engine, {})) for row in rows]

    def _compare_all(
        self,
        engine: EngineClient,
        rows: Iterable[EngineRow],
        version: int,
    ) -> None:
        began = time.perf_counter()
        serves = {row.engine for row in rows if (row.state, row.version) == ("serving", version)}
        self._found = {url: found for url, found in self._found.items() if url in serves}
        serving = [one for one in engine.each() if one.url in serves - self._found.keys()]
        with ThreadPoolExecutor(max_workers=max(1, len(serving)), thread_name_prefix="probe") as pool:
            found = pool.map(lambda one: _compare(one, *self._reference), serving)
            self._found |= {one.url: fields for one, fields in zip(serving, found, strict=True)}
        self.spans.since("probe", began)


def _compare(engine: EngineClient, reference: Reference, bound: float | None) -> Info:
    """Return fields of an engine's row; one that is beyond the bound or does not answer has an error, and is paused."""
    fields = _gaps(engine, reference, bound)
    if "error" in fields and bound is not None:
        try:
            engine.pause()
            fields["state"] = "paused"
        except WeightSyncError as error:
            fields["error"] += f"; and it could not be paused: {error}"
            if isinstance(error, EngineUnreachableError):
                fields |= {"state": "unreachable", "proof": PROOFS[0]}
    return fields


def _gaps(engine: EngineClient, reference: Reference, bound: float | None) -> Info:
    """Return fields of an engine's row; ``error`` if it is beyond the bound or does not answer."""
    prompts, trainer = reference
    fields: Info = {}
    try:
        fields["max_gap"], fields["mean_gap"] = largest, mean = gaps(trainer, engine.logprobs(prompts))
    except Exception as error:
        fields["error"] = f"{engine.url} gave no log-probabilities: {error}"
        log.warning("%s", fields["error"], exc_info=not isinstance(error, WeightSyncError))
        return fields
    if bound is None:
        return fields
    if largest <= bound:
        return {**fields, "proof": "outputs"}
    far = f"up to {largest:.3g} away (mean {mean:.3g}), and max_gap is {bound:g}"
    fields["error"] = f"{engine.url} computes other outputs than the trainer: its log-probabilities are " + (
        far if math.isfinite(largest) else "not all finite, as after a NaN or an infinity in the weights"
    )
    return fields


def _vocabulary(model: Any) -> int:
    """Return the vocabulary size in the configuration of a `transformers` model: a sharded table may have fewer rows.

    Raises:
        ConfigError: it has none.
    """
    try:
        return int(model.config.get_text_config().vocab_size)
    except AttributeError as error:
        raise ConfigError(
            f"a {type(model).__name__} does not report the size of its vocabulary",
            expected="a registered model of transformers",
            hint="give WeightSender(probe=Probe(prompts=..., compute=...)), of torchrl_ext.sync.outputs",
        ) from error


def score(model: Any, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the natural-log probability of each token after the first, given those before it.

    One forward pass per prompt, without gradients and in evaluation mode; every submodule gets its own mode back. The
    logarithm is taken in float32, of logits in the dtype that the model computes in.

    Args:
        model: a causal LM of `transformers`, or a module that is called like one: ``input_ids`` of shape
            ``(1, tokens)`` go in, and ``logits`` of shape ``(1, tokens, vocabulary)`` come out.
        prompts: token ids, each prompt of its own length.

    Returns:
        Per prompt one number less than it has tokens; NaN and -inf are kept.

    Raises:
        ConfigError: the model cannot be called so.
    """
    return [_score_one(model, prompt) for prompt in prompts]


@torch.no_grad()
def _score_one(model: Any, prompt: Sequence[int]) -> list[float]:
    with _evaluating(model):
        try:
            device = next(model.parameters()).device
            logits = model(input_ids=torch.tensor([list(prompt)], device=device), use_cache=False).logits
        except (AttributeError, TypeError) as error:
            raise ConfigError(
                f"a {type(model).__name__} computes no log-probabilities of tokens: {error}",
                expected="a causal LM of transformers",
                hint="for your own kind of model, give WeightSender(probe=...) a function that computes them",
            ) from error
    following = torch.tensor(list(prompt[1:]), device=logits.device)
    found = logits[0, :-1].float().log_softmax(-1).gather(1, following[:, None])
    return found[:, 0].tolist()


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Put a module into evaluation mode for the block; anything else has no mode."""
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    modes = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
