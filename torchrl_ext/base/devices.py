"""Devices of any vendor, by `torch.accelerator`: which there are, order between threads, and memory of theirs.

Each thread has a current device, and on it a current stream of its own, and streams are not ordered: what one thread
queued is read by another one only after an event (`recorded`, `wait_for`), or after the first has waited (`settle`).
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_ext.base.errors import ConfigError

__all__ = [
    "BACKENDS",
    "Recorded",
    "accelerator",
    "backend_of",
    "current",
    "current_device",
    "download",
    "free_cached",
    "known_device",
    "pinned_memory",
    "recorded",
    "settle",
    "upload",
    "usable_device",
    "uuids",
    "visible_devices",
    "wait_for",
]

log = logging.getLogger("torchrl_ext")

Recorded = list[tuple[torch.device, torch.Event]]
"""A point in what a thread queued on some devices."""


BACKENDS = {"cuda": "nccl"}
"""The backend that moves memory of a type of device; ROCm's type is "cuda", too."""

_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""The variable of the environment by which a process sees some of a machine's devices."""


def accelerator() -> str:
    """Return the type of this process's accelerator; "" where it sees none. Makes no context on one."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "" if found is None else found.type


def backend_of(device: torch.device) -> str:
    """Return the backend that carries tensors on a device; for one that has none gloo, over copies on the host."""
    return BACKENDS.get(device.type, "gloo")


def current_device() -> torch.device:
    """Return the device that this thread uses by default, with its index; the CPU where there is no accelerator."""
    return torch.accelerator.current_stream().device if accelerator() else torch.device("cpu")


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager in which this thread uses ``device`` by default."""
    if device.type in ("cpu", "meta"):
        return nullcontext()
    made: AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return made


def uuids() -> list[str]:
    """Return what names the accelerators of this process in others, whatever these see, by index."""
    module = torch.get_device_module(current_device())
    return [f"GPU-{module.get_device_properties(index).uuid}" for index in range(module.device_count())]


def visible_devices() -> tuple[str, list[str]]:
    """Return the variable that says which accelerators a process sees, and the names in it of those of this one."""
    count, variable = torch.accelerator.device_count() if accelerator() else 0, _VISIBLE.get(accelerator(), "")
    named = os.environ.get(variable)
    names = map(str, range(count)) if named is None else (name.strip() for name in named.split(","))
    return variable, [*names][:count]


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
    if accelerator():
        with suppress(RuntimeError):  # an allocator that keeps nothing
            torch.get_device_module(current_device()).empty_cache()


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
    if chosen.type in ("cpu", "meta"):
        return chosen
    count = torch.accelerator.device_count() if accelerator() == chosen.type else 0
    if (chosen.index or 0) >= count:
        variable = _VISIBLE.get(chosen.type, "")
        raise ConfigError(
            f"device {str(chosen)!r} cannot be used: this process sees {count} devices of type {chosen.type!r}",
            expected=f"an index below {count}" if count else "'cpu'",
            hint=f"check {f'{variable}, and ' if variable else ''}that this environment's torch was built for it",
        )
    return chosen


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor on ``device``; the host does not wait, as the copy is out of pinned memory."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies on the host, and what lies there as it is; waits once for each accelerator.

    Tensors of an accelerator may be what this thread queued last on its current stream.
    """
    found = [
        one if one.device.type == "cpu" else torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in tensors
    ]
    for copy, one in zip(found, tensors, strict=True):
        if copy is not one:
            copy.copy_(one, non_blocking=True)
    settle(one.device for one in tensors)
    return found


def pinned_memory(nbytes: int) -> Tensor:
    """Return host memory that an accelerator copies from and to at full speed: uint8, shape (nbytes,).

    torch's own pinned memory is rounded up to a power of two and kept for ever. So on CUDA this is plain memory that is
    registered, until it is freed; elsewhere torch's, where that takes at most an eighth more, or else plain memory.
    """
    if not accelerator() or not nbytes:
        return torch.empty(nbytes, dtype=torch.uint8)
    if accelerator() != "cuda":
        rounded = 1 << (nbytes - 1).bit_length()
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=8 * rounded <= 9 * nbytes)
    memory, runtime = np.empty(nbytes, np.uint8), torch.cuda.cudart()
    if int(runtime.cudaHostRegister(memory.ctypes.data, nbytes, 0)):
        log.warning("%d bytes of host memory cannot be pinned (see ulimit -l), so copies of weights are slower", nbytes)
    else:
        registered = weakref.finalize(memory, runtime.cudaHostUnregister, memory.ctypes.data)
        registered.atexit = False  # the driver does it, and may be gone by then
    return torch.from_numpy(memory)
