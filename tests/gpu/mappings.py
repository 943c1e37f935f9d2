"""Memory that can be unmapped in a block, and is as it was afterwards: that of a colocated engine that sleeps."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import contextmanager
from functools import partial

import torch

from tests.gpu.ends import device, settle

_NOBODY, _BOTH = 0, mmap.PROT_READ | mmap.PROT_WRITE


def mapping(nbytes):
    """Bytes on the device, uint8, and a function that returns the block in which nothing is mapped there."""
    kinds = {"cuda": _of_the_driver, "lag": _of_lag, "cpu": _of_the_host}
    return kinds[device().type](nbytes)


def _of_lag(nbytes):
    from tests.lag import device as lag

    memory = torch.zeros(nbytes, dtype=torch.uint8, device=device())
    return memory, partial(lag.sleeping, memory)


def _of_the_host(nbytes):
    memory, libc = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8), ctypes.CDLL(None)

    def protect(protection):
        assert libc.mprotect(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(nbytes), protection) == 0

    @contextmanager
    def sleeping():
        protect(_NOBODY)
        try:
            yield
        finally:
            protect(_BOTH)

    return memory, sleeping


class _Location(ctypes.Structure):
    """``CUmemLocation``."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Bytes:
    """What torch takes for a tensor (CUDA array interface, version 3)."""

    def __init__(self, address, nbytes):
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _of_the_driver(nbytes):
    """By the functions of virtual memory management (CUDA driver API), which vLLM's allocator calls, too."""
    torch.zeros(1, device=device())  # makes the context
    driver, word = ctypes.CDLL("libcuda.so.1"), ctypes.c_ulonglong

    def call(name, *arguments):
        status = getattr(driver, name)(*arguments)
        assert status == 0, f"{name} returns {status}"

    where = _Location(1, device().index)  # CU_MEM_LOCATION_TYPE_DEVICE
    properties, access = _Properties(1, 0, where), _Access(where, 3)  # pinned; to be read and written
    grain, address, handle = ctypes.c_size_t(), word(), word()
    call("cuMemGetAllocationGranularity", ctypes.byref(grain), ctypes.byref(properties), 0)
    size = ctypes.c_size_t(-(-nbytes // grain.value) * grain.value)
    call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), word(0), word(0))
    call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), word(0))

    def appear():
        call("cuMemMap", address, size, ctypes.c_size_t(0), handle, word(0))
        call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))

    @contextmanager
    def sleeping():
        settle()
        call("cuMemUnmap", address, size)
        try:
            yield
        finally:
            appear()

    appear()
    return torch.as_tensor(_Bytes(address.value, nbytes), device=device()).zero_(), sleeping
