"""Devices: whether one that a setting names can be used, order between threads, and giving back cached memory.

Each thread has a current stream of its own on an accelerator, and streams are not ordered: what one thread queued is
read by another one only after an event (`recorded`, `wait_for`), or after the first has waited (`settle`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torchrl_ext.base.errors import ConfigError

__all__ = ["Recorded", "free_cached", "known_device", "recorded", "settle", "usable_device", "wait_for"]

Recorded = list[tuple[torch.device, torch.Event]]
"""A point in what a thread queued on some devices."""


def recorded(devices: Iterable[torch.device]) -> Recorded:
    """Record what this thread has queued on these devices, for `wait_for` in another one."""
    return [(device, torch.accelerator.current_stream(device).record_event()) for device in _with_streams(devices)]


def wait_for(events: Recorded) -> None:
    """Let what this thread queues from now on run after what was recorded; the host does not wait."""
    for device, event in events:
        torch.accelerator.current_stream(device).wait_event(event)


def settle(devices: Iterable[torch.device]) -> None:
    """Wait until what this thread has queued on these devices is done."""
    for device in _with_streams(devices):
        torch.accelerator.current_stream(device).synchronize()


def _with_streams(devices: Iterable[torch.device]) -> set[torch.device]:
    return {device for device in devices if device.type not in ("cpu", "meta")}


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
