"""`MaxLag`: rollouts whose weights are too old are masked or dropped before the loss sees them."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from tensordict import TensorDictBase, lazy_stack
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.envs import Transform

from torchrl_ext.errors import ConfigError

__all__ = ["MaxLag"]

log = logging.getLogger("torchrl_ext")


class MaxLag(Transform):
    """Takes tokens out of training that weights more than ``max_lag`` versions old have sampled.

    Put it where data is used: as a transform of the replay buffer, where it looks at every sample that is drawn, or as
    ``postproc`` of a collector. A masked token is False in ``all_assistant_mask`` and NaN in the full
    log-probabilities, which is how TorchRL's LLM objectives leave a token out, whatever their masking strategy. Stored
    data is not changed.

    A token whose version an engine did not tell counts as too old.

    Args:
        max_lag: 0 keeps only what the newest weights have sampled.
        version: the trainer's newest version, such as ``lambda: sender.version``.
        drop: leave out whole trajectories that have such a token, in place of the tokens alone. Fewer, or no, entries
            come back; groups that an advantage compares have to be compared before.
        versions_key, masks_key, log_probs_key: entries of the policy.

    Attributes:
        seen, stale: tokens of the policy looked at so far, and those among them that were too old.

    Raises:
        ConfigError: ``max_lag`` is negative.
    """

    def __init__(
        self,
        max_lag: int,
        version: Callable[[], int],
        *,
        drop: bool = False,
        versions_key: NestedKey = "token_versions",
        masks_key: NestedKey = "masks",
        log_probs_key: NestedKey = "log_probs",
    ) -> None:
        super().__init__()
        if max_lag < 0:
            raise ConfigError(f"max_lag is {max_lag}", expected="at least 0")
        self._max_lag, self._version, self._drop = max_lag, version, drop
        self._versions = (versions_key, "full")
        self._mask = (masks_key, "all_assistant_mask")
        self._log_probs = (log_probs_key, "full")
        self.seen = self.stale = 0

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """What of ``tensordict`` is fresh enough now; any batch size, trajectories along the first dimension.

        Raises:
            ConfigError: the versions or the masks of `RemoteLLMPolicy` are not there.
        """
        newest = self._version()
        trajectories = [self._fresh(entry, newest) for entry in tensordict.unbind(0)]
        if not self._drop:
            return lazy_stack([masked for masked, _ in trajectories], 0)
        kept = [i for i, (_, stale) in enumerate(trajectories) if not stale]
        if len(kept) < len(trajectories):
            log.info("dropped %d of %d trajectories: older than %d versions", len(trajectories) - len(kept),
                     len(trajectories), self._max_lag)  # fmt: skip
        return tensordict[torch.tensor(kept, dtype=torch.long)] if kept else tensordict[:0]

    def _fresh(self, entry: TensorDictBase, newest: int) -> tuple[TensorDictBase, int]:
        """``entry`` without its stale tokens, and their number."""
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
        return (self._masked(entry, said & ~stale, stale) if count else entry), count

    def _masked(self, entry: TensorDictBase, said: Tensor, stale: Tensor) -> TensorDictBase:
        masked = entry.clone(recurse=False).set(self._mask, said)
        log_probs = masked.get(self._log_probs, None)
        return masked if log_probs is None else masked.set(self._log_probs, log_probs.masked_fill(stale, torch.nan))
