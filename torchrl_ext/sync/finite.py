"""`FiniteCheck` looks for NaN and infinity in the weights of one update."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from typing import final

import torch
from torch import Tensor

from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.weights.finite import nought_of

__all__ = ["FiniteCheck"]

log = logging.getLogger("torchrl_ext")


@final
class FiniteCheck:
    """Looks at each floating-point tensor of an update once, however often it passes.

    Args:
        policy: ``"warn"`` collects what it finds for `warn`; ``"refuse"`` raises at once; ``"send"`` does not look.
        left: whether passes over the weights leave the look to the transport (`Transport.looks`).

    Attributes:
        left: whether they do; not where nobody looks.

    Raises:
        ConfigError: there is no such policy.
    """

    def __init__(self, policy: str = "send", *, left: bool = False) -> None:
        if policy not in ("warn", "refuse", "send"):
            raise ConfigError(f"there is no finite={policy!r}", expected="'warn', 'refuse' or 'send'")
        self._policy, self.left = policy, left and policy != "send"
        self._sums: dict[Hashable, tuple[str, Tensor]] = {}  # 0, or NaN where something is not finite

    def look(self, name: str, tensor: Tensor, block: Hashable = None) -> Tensor | None:
        """Look at a tensor, or at a ``block`` of it.

        Returns:
            A scalar on the tensor's device: 0 where it is finite, else NaN; None where there is nothing to look at.

        Raises:
            ManifestError: it has a NaN or an infinity, which are refused.
        """
        key = (name, block)
        if self._policy == "send" or not tensor.is_floating_point() or not tensor.numel():
            return None
        if key not in self._sums:
            self._sums[key] = name, nought_of(tensor.detach())
        if self._policy == "refuse" and self._sums[key][1].item() != 0.0:
            raise ManifestError(
                _words(self._found()),
                expected="finite weights, since finite='refuse'",
                hint="look for what spoils the weights in training, or send them all the same with finite='warn'",
            )
        return self._sums[key][1]

    def look_ahead(self, held: Mapping[str, Tensor]) -> None:
        """Look at tensors before the update begins, where a NaN or an infinity is refused.

        Raises:
            ManifestError: one of them has some.
        """
        if self._policy == "refuse":
            for name, tensor in held.items():
                self.look(name, tensor)

    @property
    def finite(self) -> bool | None:
        """Whether everything was finite at which it looked; None where it does not look."""
        return None if self._policy == "send" else not self._found()

    def warn(self, version: int) -> None:
        """Log one warning if something is not finite; where that is refused, an error says it."""
        if self._policy == "warn" and (found := self._found()):
            log.warning("weights version %d: %s", version, _words(found))

    def _found(self) -> list[str]:
        """Return the names of tensors that are not finite, in order; one wait per device."""
        rows = [*self._sums.values()]
        bad: set[int] = set()
        for device in {value.device for _, value in rows}:
            places = [place for place, (_, value) in enumerate(rows) if value.device == device]
            values = torch.stack([rows[place][1] for place in places]).tolist()
            bad.update(place for place, value in zip(places, values, strict=True) if value != 0.0)
        return list(dict.fromkeys(rows[place][0] for place in sorted(bad)))


def _words(found: list[str]) -> str:
    others = f", the first of {len(found)} such tensors" if len(found) > 1 else ""
    return f"there is a NaN or an infinity in {found[0]!r}{others}"
