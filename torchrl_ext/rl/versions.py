"""Which weights sampled each token (`TokenVersions`), and how far rollouts may lag behind training (`MaxLag`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorClass, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.envs import Transform

from torchrl_ext.base.errors import ConfigError

__all__ = ["MaxLag", "TokenVersions"]

_MASK, _LOG_PROBS = ("masks", "all_assistant_mask"), ("log_probs", "full")


class TokenVersions(TensorClass["nocast"]):  # type: ignore[misc, name-defined]  # tensordict has no types
    """The versions of the weights that sampled tokens, beside TorchRL's `Tokens` and `LogProbs`.

    Numbers are comparable within one run only: they begin anew where a trainer meets neither the engines nor the
    shared directory of an earlier one.

    Attributes:
        response: version that sampled each token of the response, shape (R,), int64; 0 for an engine's initial weights,
            -1 where the engine reports none.
        full: the same for prompt and response, shape (P + R,), int64; -1 over the prompt.
        run: the run that numbers the versions, as the policy was given it.
    """

    response: torch.Tensor
    full: torch.Tensor
    run: str

    def within(self, max_lag: int, run: str, newest: int) -> Tensor:
        """Return which tokens of ``full`` versions ``newest - max_lag`` to ``newest`` of ``run`` sampled.

        Returns:
            Shape (P + R,), bool; False also where the version is not known.
        """
        if self.run != run:
            return torch.zeros_like(self.full, dtype=torch.bool)
        oldest = max(0, newest - max_lag)  # a higher number than the newest is an earlier run's under the same name
        return (self.full >= oldest) & (self.full <= newest)


class MaxLag(Transform):  # type: ignore[misc]  # torchrl has no types
    """Excludes tokens from training if the weights that sampled them are more than ``max_lag`` versions old.

    Use it where training reads data: as a transform of the replay buffer, where it checks every sample, or as
    ``postproc`` of a collector. A masked token is False in ``all_assistant_mask`` and NaN in the full
    log-probabilities, so that TorchRL's LLM objectives skip it under any masking strategy. Stored data does not change.
    A token of another run, or whose version the engine does not report, counts as too old.

    Args:
        max_lag: 0 keeps only tokens that the newest weights sampled.
        version: returns the trainer's newest version, such as ``lambda: sender.version``.
        run: the run of that version, the same that `RemoteLLMPolicy` is given. Name it where data outlives the trainer,
            as in a replay buffer that is saved: the next trainer may number its versions from 1 again.

    Attributes:
        seen, stale: number of the policy's tokens checked so far, and how many of them were too old.

    Raises:
        ConfigError: ``max_lag`` is negative.
    """

    def __init__(self, max_lag: int, version: Callable[[], int], *, run: str = "") -> None:
        super().__init__()
        if max_lag < 0:
            raise ConfigError(f"max_lag is {max_lag}", expected="at least 0")
        self._max_lag, self._version, self._run = max_lag, version, run
        self.seen = self.stale = 0

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return ``tensordict``, with trajectories along its first dimension, without stale tokens.

        Raises:
            ConfigError: the versions or the masks of `RemoteLLMPolicy` are missing.
        """
        newest = self._version()
        return lazy_stack([self._fresh(entry, newest) for entry in tensordict.unbind(0)], 0)

    def _fresh(self, entry: TensorDictBase, newest: int) -> TensorDictBase:
        """Return ``entry`` with its stale tokens masked."""
        if entry.ndim:
            return lazy_stack([self._fresh(turn, newest) for turn in entry.unbind(0)], 0)
        versions, said = entry.get("token_versions", None), entry.get(_MASK, None)
        if not isinstance(versions, TokenVersions) or said is None:
            raise ConfigError(
                f"there are no {'masks' if said is None else 'token_versions'} in the rollout",
                expected="rollouts of torchrl_ext.RemoteLLMPolicy",
            )
        stale = said & ~versions.within(self._max_lag, self._run, newest)
        count = int(stale.sum())
        self.seen, self.stale = self.seen + int(said.sum()), self.stale + count
        if not count:
            return entry
        masked = entry.clone(recurse=False).set(_MASK, said & ~stale)
        if (log_probs := masked.get(_LOG_PROBS, None)) is not None:
            masked.set(_LOG_PROBS, log_probs.masked_fill(stale, torch.nan))
        return masked
