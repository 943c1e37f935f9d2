"""The lagging device (`lag.cpp`) in torch, as device ``"lag"``: ``lag:0`` and ``lag:1``.

A process that has loaded it keeps it; `here` says when torch takes it for the accelerator of this machine.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tests.lag.build import library
from torchrl_ext.data.ipc.memory import SHARING, Sharing

__all__ = ["counts", "here", "load", "sleeping", "waits"]

_COUNTED = ("blocking copies", "items", "synchronisations", "late copies", "pinned bytes", "most pinned bytes")
_WAITS = _COUNTED[:3]
_on = False


def _index(device: torch.device | str | int | None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.ops.lag.exchange_device(-1) if index is None else index


class _Current:
    """``torch.lag.device``: the current device in a block."""

    def __init__(self, device: torch.device | str | int) -> None:
        self._device = _index(device)

    def __enter__(self) -> None:
        self._before = torch.ops.lag.exchange_device(self._device)

    def __exit__(self, *_: object) -> None:
        torch.ops.lag.exchange_device(self._before)


@functools.cache
def load() -> None:
    """Load the device into this process.

    Raises:
        Unbuilt: as `library`.
    """
    torch.ops.load_library(str(library()))
    module = types.ModuleType("torch.lag")
    answers = {
        "device": _Current,
        "is_available": lambda: _on,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 2 if _on else 0,
        "current_device": lambda: torch.ops.lag.exchange_device(-1),
        "set_device": lambda device: torch.ops.lag.exchange_device(_index(device)),
        "current_stream": lambda device=None: torch.accelerator.current_stream(_index(device)),
        "empty_cache": lambda: torch.accelerator.synchronize(torch.ops.lag.exchange_device(-1)),  # frees nothing
        "synchronize": lambda device=None: torch.accelerator.synchronize(_index(device)),
        "get_device_properties": lambda device=None: types.SimpleNamespace(name="lag", uuid=f"lag-{_index(device)}"),
    }
    for name in ("init", "_lazy_init", "manual_seed", "manual_seed_all"):
        answers[name] = lambda *_: None
    vars(module).update(answers)
    torch.utils.rename_privateuse1_backend("lag")
    torch._register_device_module("lag", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


@contextmanager
def here() -> Iterator[torch.device]:
    """Have torch take the device for this machine's accelerator in the block; yields ``lag:0``, which is current."""
    global _on
    load()
    _on = True
    torch.ops.lag.available(True)
    SHARING["lag"] = Sharing(_give, _take)
    try:
        with _Current(0):
            yield torch.device("lag:0")
            for index in (0, 1):
                torch.accelerator.synchronize(torch.device("lag", index))
    finally:
        _on = False
        del SHARING["lag"]
        torch.ops.lag.available(False)


def counts() -> dict[str, int]:
    """Return what the process has counted until now, by name."""
    return {name: torch.ops.lag.count(name) for name in _COUNTED}


def waits() -> int:
    """Return how often the host has waited for the device until now."""
    return sum(torch.ops.lag.count(name) for name in _WAITS)


@contextmanager
def sleeping(*tensors: Tensor, kept: bool = True) -> Iterator[None]:
    """Unmap the memory of tensors in the block: whatever touches it then ends the process.

    Args:
        tensors: all of the device.
        kept: they are as they were afterwards; else poison.
    """
    for tensor in tensors:
        torch.ops.lag.map(tensor, False, kept)
    try:
        yield
    finally:
        for tensor in tensors:
            torch.ops.lag.map(tensor, True, kept)


def _give(flat: Tensor) -> list[bytes | int | bool]:
    """Return the file, its size and where the memory begins in it, for another process of this machine."""
    descriptor, size, offset = torch.ops.lag.share(flat)
    return [f"/proc/{os.getpid()}/fd/{descriptor}".encode(), size, offset]


def _take(index: int, nbytes: int, given: list[bytes | int | bool]) -> Tensor:
    path, size, offset = given
    return torch.ops.lag.attach(path.decode(), size, index)[offset : offset + nbytes]
