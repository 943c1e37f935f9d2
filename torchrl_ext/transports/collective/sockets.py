"""This process's own TCP sockets, for what gloo does not offer: a way to end a wait.

They are looked at through the C library, which changes nothing about them: Python's own socket objects would set the
mode of a connection that another thread reads. Works where ``/dev/fd`` lists open files (Linux, macOS); elsewhere
nothing is found and the backends' timeouts remain.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["connected", "listening", "shut_down"]

_LIBC = ctypes.CDLL(None, use_errno=True)
_ADDRESS_BYTES = 128  # of the largest address that a system knows (sockaddr_storage)


def listening() -> Iterator[tuple[Any, ...]]:
    """Where this process listens."""
    for number in _descriptors():
        own = _endpoint(_LIBC.getsockname, number)
        if own is not None and _accepts(number):
            yield own


def connected(endpoints: set[tuple[Any, ...]]) -> Iterator[int]:
    """Descriptors, valid until the next is asked for, of connections that begin or end at one of ``endpoints``."""
    for number in _descriptors():
        own, other = _endpoint(_LIBC.getsockname, number), _endpoint(_LIBC.getpeername, number)
        if own is not None and other is not None and {own, other} & endpoints:
            yield number


def shut_down(endpoints: set[tuple[Any, ...]]) -> None:
    """End every connection that begins or ends at one of ``endpoints``; whoever waits on one sees it closed."""
    for number in connected(endpoints):
        _LIBC.shutdown(number, int(socket.SHUT_RDWR))  # fails on one that was closed meanwhile, which is as good


def _descriptors() -> Iterator[int]:
    """Duplicates, closed after use, of what this process has open: nobody can put another file into their place."""
    try:
        entries = os.listdir("/dev/fd")
    except OSError:
        return
    for entry in entries:
        try:
            copy = os.dup(int(entry))
        except OSError:
            continue  # closed since it was listed
        try:
            yield copy
        finally:
            os.close(copy)


def _endpoint(ask: Any, number: int) -> tuple[Any, ...] | None:
    """``(host, port)``, IPv4 addresses in their own form; None for what is no internet socket, or has no such end."""
    found, length = ctypes.create_string_buffer(_ADDRESS_BYTES), ctypes.c_uint32(_ADDRESS_BYTES)
    if ask(number, found, ctypes.byref(length)) != 0:
        return None
    raw = found.raw[: length.value]
    if len(raw) < 4:
        return None
    family = struct.unpack_from("=H", raw)[0] if sys.platform.startswith("linux") else raw[1]  # BSDs: length, family
    if family not in (socket.AF_INET, socket.AF_INET6):
        return None
    (port,) = struct.unpack_from(">H", raw, 2)
    host = raw[4:8] if family == socket.AF_INET else raw[8:24]
    return (socket.inet_ntop(family, host).removeprefix("::ffff:"), port)


def _accepts(number: int) -> bool:
    value, length = ctypes.c_int(0), ctypes.c_uint32(ctypes.sizeof(ctypes.c_int))
    done = _LIBC.getsockopt(number, socket.SOL_SOCKET, socket.SO_ACCEPTCONN, ctypes.byref(value), ctypes.byref(length))
    return done == 0 and bool(value.value)
