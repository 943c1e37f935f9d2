"""`FiniteCheck` looks for NaN and infinity in the weights of one update; `nought_of` in one tensor."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable
from typing import final

import torch
from torch import Tensor

from torchrl_ext.errors import ConfigError, ManifestError

__all__ = ["FiniteCheck", "nought_of"]

log = logging.getLogger("torchrl_ext")

_CHUNK = 1 << 20  # elements of a dtype without comparisons, which are cast at a time


@final
class FiniteCheck:
    """Looks at each floating-point tensor of an update once, however often it passes.

    Args:
        policy: ``"warn"`` collects what it finds for `warn`; ``"refuse"`` raises at once; ``"send"`` does not look.
        left: whether passes over the weights leave the look to the transport (its `Transport.parts` is false).

    Attributes:
        left: whether they do; not where nobody looks.

    Raises:
        ConfigError: there is no such policy.
    """

    def __init__(self, policy: str = "send", *, left: bool = False) -> None:
        if policy not in ("warn", "refuse", "send"):
            raise ConfigError(f"finite cannot be {policy!r}", expected="'warn', 'refuse' or 'send'")
        self._policy, self.left = policy, left and policy != "send"
        self._noughts: dict[tuple[str, Hashable], Tensor] = {}  # by name and block: see `nought_of`

    def look(
        self, name: str, tensor: Tensor, block: Hashable = None, dtype: torch.dtype | None = None
    ) -> Tensor | None:
        """Look at a tensor, or at a ``block`` of it, as it is once it was cast to ``dtype``.

        Returns:
            A scalar on the tensor's device: 0 where it is finite, else NaN; None where there is nothing to look at.

        Raises:
            ManifestError: it has a NaN or an infinity, which are refused.
        """
        if self._policy == "send" or not tensor.is_floating_point() or not tensor.numel():
            return None
        if (name, block) not in self._noughts:
            self._noughts[name, block] = nought_of(tensor.detach().to(dtype))
        nought = self._noughts[name, block]
        if self._policy == "refuse" and nought.item() != 0.0:
            raise ManifestError(
                f"there is a NaN or an infinity in {name!r}",
                expected="finite weights, since finite='refuse'",
                hint="find what makes the weights non-finite in training, or send them anyway with finite='warn'",
            )
        return nought

    @property
    def finite(self) -> bool | None:
        """Whether everything was finite at which it looked; None where it does not look."""
        return None if self._policy == "send" else not self._found()

    def warn(self, version: int) -> None:
        """Log one warning if something is not finite; where that is refused, an error says it."""
        if self._policy == "warn" and (found := self._found()):
            others = f", the first of {len(found)} such tensors" if len(found) > 1 else ""
            log.warning("weights version %d: there is a NaN or an infinity in %r%s", version, found[0], others)

    def _found(self) -> list[str]:
        """Return the names of tensors that are not finite, in order; one wait per device."""
        bad: set[tuple[str, Hashable]] = set()
        for device in {nought.device for nought in self._noughts.values()}:
            here = {key: nought for key, nought in self._noughts.items() if nought.device == device}
            values = torch.stack([*here.values()]).tolist()
            bad.update(key for key, value in zip(here, values, strict=True) if value != 0.0)
        return list(dict.fromkeys(key[0] for key in self._noughts if key in bad))


def nought_of(tensor: Tensor) -> Tensor:
    """Return a float32 scalar on the device of a floating-point tensor: 0 where all elements are finite, else NaN."""
    summed = tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.bfloat16, torch.float64)
    if summed and math.isfinite(tensor.sum().item()):  # much faster than aminmax; a sum of finite numbers may overflow
        return torch.zeros(())
    if tensor.element_size() > 1:
        low, high = torch.aminmax(tensor)
        return (low * 0 + high * 0).float()  # float32 would make infinities of large finite numbers
    if "float4" in str(tensor.dtype):  # has neither
        return torch.zeros((), device=tensor.device)
    return torch.stack([chunk.float().mul_(0).sum() for chunk in tensor.reshape(-1).split(_CHUNK)]).sum()
