"""Devices: whether one that a setting names exists and can be used, and giving back what torch keeps of its memory."""

from __future__ import annotations

import torch

from torchrl_ext.errors import ConfigError

__all__ = ["free_cached", "known_device", "usable_device"]


def free_cached() -> None:
    """Give back the memory of the accelerator, if there is one, that torch keeps and no tensor uses."""
    if torch.accelerator.is_available():
        empty = getattr(torch.accelerator, "empty_cache", torch.cuda.empty_cache)  # before torch 2.9 CUDA has it alone
        empty()


def known_device(device: torch.device | str | int) -> torch.device:
    """Return ``device`` as a `torch.device`.

    Raises:
        ConfigError: torch knows no such device.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        why = str(error).splitlines()[0]
        raise ConfigError(f"{device!r} is not a device: {why}", expected="'cpu', 'cuda:0', ...") from None


def usable_device(device: torch.device | str | int) -> torch.device:
    """Return ``device`` as a `torch.device` that this process can use.

    Raises:
        ConfigError: torch knows no such device, or this process does not see it.
    """
    chosen = known_device(device)
    if chosen.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (chosen.index or 0) >= count:
            raise ConfigError(
                f"device {str(chosen)!r} cannot be used: this process sees {count} CUDA devices",
                expected=f"an index below {count}" if count else "'cpu'",
                hint="check CUDA_VISIBLE_DEVICES, and torch.version.cuda of this environment",
            )
    return chosen
