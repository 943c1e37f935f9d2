"""Limit how far rollouts lag behind training: `MaxLag` masks tokens that are too old, `Pacer` prevents them."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from tensordict.utils import NestedKey
from torchrl.envs import Transform

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError, DeadlineError

__all__ = ["MaxLag", "Pacer"]

log = logging.getLogger("torchrl_ext")

_LOOK_S = 0.05


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
        versions_key, masks_key, log_probs_key: keys of the policy's outputs.

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


class Pacer:
    """Delays new sequences, so that training can use each one while its weights are recent enough.

    With ``v`` versions accepted, at most ``(v + max_lag + 1) * turns_per_version`` sequences are ever started: the
    batch that the trainer waits for and ``max_lag`` more (AReaL's rule, https://arxiv.org/abs/2505.24298, section 5.1).

    A pickled copy, such as that of a policy in another process, counts that process's sequences from the version at
    which it arrives; ``version`` must be picklable.

    Args:
        version: returns the trainer's newest version, like ``lambda: sender.version``; the collector's thread calls it.
        max_lag: versions by which training may advance between sampling a sequence and using it.
        turns_per_version: sequences that training uses per version.
        timeout_s: longest wait, in seconds.

    Raises:
        ConfigError: a number out of range.
    """

    def __init__(
        self, version: Callable[[], int], *, max_lag: int, turns_per_version: int, timeout_s: float = 600.0
    ) -> None:
        if max_lag < 0 or turns_per_version < 1 or timeout_s <= 0:
            raise ConfigError(
                f"max_lag={max_lag}, turns_per_version={turns_per_version}, timeout_s={timeout_s}",
                expected="max_lag >= 0, turns_per_version >= 1 and timeout_s > 0",
            )
        self._version, self._first = version, version()
        self._max_lag, self._turns, self._timeout_s = max_lag, turns_per_version, timeout_s
        self._started, self._counting = 0, threading.Lock()

    @property
    def started(self) -> int:
        """The number of sequences started so far."""
        return self._started

    def __reduce__(self) -> tuple[Any, ...]:
        how: dict[str, Any] = {"max_lag": self._max_lag, "turns_per_version": self._turns, "timeout_s": self._timeout_s}
        return functools.partial(Pacer, self._version, **how), ()

    def allowed(self) -> int:
        """Return how many sequences may have been started by now."""
        return (self._version() - self._first + self._max_lag + 1) * self._turns

    @contextmanager
    def starting(self, count: int) -> Iterator[None]:
        """Wait until ``count`` more sequences may start, then run the block; if it fails, they do not count.

        Raises:
            DeadlineError: training did not advance far enough in time.
        """

        def late() -> DeadlineError:
            return DeadlineError(
                f"the trainer did not advance beyond version {self._version()} for {self._timeout_s:g} s, and "
                f"rollouts are {self._started} sequences ahead of version {self._first}",
                expected=f"{self._started + count} sequences within {self.allowed()}",
                hint="check that the trainer runs; if it is just slow, raise max_lag or timeout_s",
            )

        Deadline(self._timeout_s).poll(lambda: self._started_now(count), late=late, longest_s=_LOOK_S)
        try:
            yield
        except BaseException:
            with self._counting:
                self._started -= count
            raise

    def _started_now(self, count: int) -> bool:
        """Count ``count`` more sequences if they may start now; return whether they may."""
        with self._counting:
            if self._started + count > max(self.allowed(), count):  # a batch above the limit may start if it is first
                return False
            self._started += count
            return True
