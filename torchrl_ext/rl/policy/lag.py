"""Limit how far rollouts lag behind training: `MaxLag` masks tokens that are too old."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from tensordict import TensorDictBase, lazy_stack
from tensordict.utils import NestedKey
from torchrl.envs import Transform

from torchrl_ext.base.errors import ConfigError

__all__ = ["MaxLag"]

log = logging.getLogger("torchrl_ext")


class MaxLag(Transform):  # type: ignore[misc]  # torchrl has no types
    """Excludes tokens from training if the weights that sampled them are more than ``max_lag`` versions old.

    Use it where training reads data: as a transform of the replay buffer, where it checks every sample, or as
    ``postproc`` of a collector. A masked token is False in ``all_assistant_mask`` and NaN in the full
    log-probabilities, so that TorchRL's LLM objectives skip it under any masking strategy. Stored data does not change.
    A token whose version the engine does not report counts as too old.

    Args:
        max_lag: 0 keeps only tokens that the newest weights sampled.
        version: returns the trainer's newest version, such as ``lambda: sender.version``.
        drop: drop whole trajectories that have such a token, instead of masking the token. The batch may then shrink or
            become empty, so compute advantages over groups before.
        masks_key, log_probs_key: keys of the policy's outputs.

    Attributes:
        seen, stale: number of the policy's tokens checked so far, and how many of them were too old.

    Raises:
        ConfigError: ``max_lag`` is negative.
    """

    def __init__(
        self,
        max_lag: int,
        version: Callable[[], int],
        *,
        drop: bool = False,
        masks_key: NestedKey = "masks",
        log_probs_key: NestedKey = "log_probs",
    ) -> None:
        super().__init__()
        if max_lag < 0:
            raise ConfigError(f"max_lag is {max_lag}", expected="at least 0")
        self._max_lag, self._version, self._drop = max_lag, version, drop
        self._versions = ("token_versions", "full")
        self._mask = (masks_key, "all_assistant_mask")
        self._log_probs = (log_probs_key, "full")
        self.seen = self.stale = 0

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return ``tensordict``, with trajectories along its first dimension, without stale tokens or trajectories.

        Raises:
            ConfigError: the versions or the masks of `RemoteLLMPolicy` are missing.
        """
        newest = self._version()
        trajectories = [self._fresh(entry, newest) for entry in tensordict.unbind(0)]
        if not self._drop:
            return lazy_stack([masked for masked, _ in trajectories], 0)
        kept = [i for i, (_, stale) in enumerate(trajectories) if not stale]
        if dropped := len(trajectories) - len(kept):
            what = "dropped %d of %d trajectories: older than %d versions"
            log.info(what, dropped, len(trajectories), self._max_lag)
        return tensordict[torch.tensor(kept, dtype=torch.long)] if kept else tensordict[:0]

    def _fresh(self, entry: TensorDictBase, newest: int) -> tuple[TensorDictBase, int]:
        """Return ``entry`` with its stale tokens masked, and their number."""
        if entry.ndim:
            turns = [self._fresh(turn, newest) for turn in entry.unbind(0)]
            return lazy_stack([turn for turn, _ in turns], 0), sum(stale for _, stale in turns)
        versions, said = entry.get(self._versions, None), entry.get(self._mask, None)
        if versions is None or said is None:
            raise ConfigError(
                f"there is no {self._versions if versions is None else self._mask} in the rollout",
                expected="rollouts of torchrl_ext.RemoteLLMPolicy",
            )
        stale = said & ((versions < 0) | (newest - versions > self._max_lag))
        count = int(stale.sum())
        self.seen, self.stale = self.seen + int(said.sum()), self.stale + count
        if not count:
            return entry, 0
        masked = entry.clone(recurse=False).set(self._mask, said & ~stale)
        if (log_probs := masked.get(self._log_probs, None)) is not None:
            masked.set(self._log_probs, log_probs.masked_fill(stale, torch.nan))
        return masked, count
