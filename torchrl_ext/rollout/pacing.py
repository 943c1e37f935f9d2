"""`Pacer`: rollouts wait while they are too far ahead of training, so that what they make is not stale when used."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torchrl_ext.errors import ConfigError, DeadlineError

__all__ = ["Pacer"]

_LOOK_S = 0.05


class Pacer:
    """Admits the sequences that training can still use fresh.

    With ``v`` versions accepted and ``turns_per_version`` sequences used up per version, at most
    ``(v + max_lag + 1) * turns_per_version`` sequences are ever started: the batch that the trainer waits for, and
    ``max_lag`` more (the rule of AReaL, https://arxiv.org/abs/2505.24298, section 5.1).

    Sent to another process (with the policy that has it), a pacer counts the sequences of that process, from the
    version at which it arrives; ``version`` goes along, so it has to be something that can be pickled.

    Args:
        version: the trainer's newest version, such as ``lambda: sender.version``; called from the collector's thread.
        max_lag: versions that training may advance between the sampling of a sequence and its use.
        turns_per_version: sequences that training uses between two versions.
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
        self._started, self._changed = 0, threading.Condition()

    @property
    def started(self) -> int:
        """Sequences admitted so far."""
        return self._started

    def __reduce__(self) -> tuple[Any, ...]:
        return _pacer, (self._version, self._max_lag, self._turns, self._timeout_s)

    def allowed(self) -> int:
        """Sequences that may have been started by now."""
        return (self._version() - self._first + self._max_lag + 1) * self._turns

    def admit(self, count: int) -> None:
        """Wait until ``count`` more sequences may start.

        Raises:
            DeadlineError: training did not get there in time.
        """
        until = time.monotonic() + self._timeout_s
        with self._changed:
            while self._started + count > max(self.allowed(), count):  # a first batch above the limit goes alone
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise DeadlineError(
                        f"the trainer did not go beyond version {self._version()} for {self._timeout_s:g} s, and "
                        f"rollouts are {self._started} sequences ahead of version {self._first}",
                        expected=f"{self._started + count} sequences within {self.allowed()}",
                        hint="does the trainer still run? Raise max_lag or timeout_s if it is only slow",
                    )
                self._changed.wait(min(_LOOK_S, left_s))
            self._started += count

    @contextmanager
    def admitted(self, count: int) -> Iterator[None]:
        """`admit` for a block that starts the sequences; where it fails, none was made and others may start.

        Raises:
            DeadlineError: as for `admit`.
        """
        self.admit(count)
        try:
            yield
        except BaseException:
            with self._changed:
                self._started -= count
                self._changed.notify_all()
            raise


def _pacer(version: Callable[[], int], max_lag: int, turns: int, timeout_s: float) -> Pacer:
    return Pacer(version, max_lag=max_lag, turns_per_version=turns, timeout_s=timeout_s)
