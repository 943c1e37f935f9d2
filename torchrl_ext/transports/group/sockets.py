"""TCP sockets by which ranks reach each other, and a way to end a wait on them, which gloo does not offer.

To end a wait, this process's own sockets are found through the C library, which changes nothing about them: Python's
socket objects would set the mode of a connection that another thread reads. Works where ``/dev/fd`` lists open files
(Linux, macOS); elsewhere nothing is found and the backends' timeouts remain.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from torchrl_ext.deadline import in_thread, pauses
from torchrl_ext.errors import DeadlineError, TransportError

__all__ = [
    "at_port", "await_calls", "carried", "connected", "dial", "in_time", "listen", "listening", "run_beside",
    "shut_down",
]  # fmt: skip

_ANYWHERE = ("::", "0.0.0.0")
_LIBC = ctypes.CDLL(None, use_errno=True)
_PAUSE_S, _SLICE_S = 0.001, 0.05
_ADDRESS_BYTES = 128  # of the largest address that a system knows (sockaddr_storage)
_TCP_INFO, _INFO_BYTES = 11, 256
_CARRIED = struct.Struct("=120xQQ")
"""``tcpi_bytes_acked`` and ``tcpi_bytes_received`` of struct tcp_info (linux/tcp.h), to which fields are only added."""


def listening() -> Iterator[tuple[Any, ...]]:
    """Yield the addresses, ``(host, port)``, at which this process listens."""
    for number in _descriptors():
        own = _endpoint(_LIBC.getsockname, number)
        if own is not None and _accepts(number):
            yield own


def connected(endpoints: set[tuple[Any, ...]]) -> Iterator[int]:
    """Yield a descriptor, valid until the next, of each connection that begins or ends at one of ``endpoints``."""
    seen = set()  # another thread that looks just now has duplicates of its own open
    for number in _descriptors():
        own, other = _endpoint(_LIBC.getsockname, number), _endpoint(_LIBC.getpeername, number)
        if own is not None and other is not None and {own, other} & endpoints and (own, other) not in seen:
            seen.add((own, other))
            yield number


def at_port(port: int) -> set[tuple[Any, ...]]:
    """Return the addresses of this process at which a connection ends at ``port``."""
    found = {_endpoint(_LIBC.getsockname, number) for number in _descriptors()}
    return {own for own in found if own is not None and own[1] == port}


def carried(endpoints: set[tuple[Any, ...]]) -> tuple[int, int]:
    """Return the bytes that connections of `connected` sent (and know to be there) and received; zeros off Linux."""
    sent = received = 0
    for number in connected(endpoints) if sys.platform.startswith("linux") else ():
        found, length = ctypes.create_string_buffer(_INFO_BYTES), ctypes.c_uint32(_INFO_BYTES)
        if _LIBC.getsockopt(number, socket.IPPROTO_TCP, _TCP_INFO, found, ctypes.byref(length)) == 0:
            out, back = _CARRIED.unpack_from(found.raw)
            sent, received = sent + out, received + back
    return sent, received


def shut_down(endpoints: set[tuple[Any, ...]]) -> None:
    """End every connection that begins or ends at one of ``endpoints``; waits on it see it closed."""
    for number in connected(endpoints):
        _LIBC.shutdown(number, int(socket.SHUT_RDWR))  # fails on one that was closed meanwhile, which is as good


def _descriptors() -> Iterator[int]:
    """Yield a duplicate, closed after use, of each open socket, so that no other can take its number.

    No duplicate of a file is ever closed: that would drop every POSIX lock (`fcntl.lockf`, SQLite's) of this process on
    the file.
    """
    try:
        entries = os.listdir("/dev/fd")
    except OSError:
        return
    for entry in entries:
        try:
            if not stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                continue
            copy = os.dup(int(entry))
        except OSError:
            continue  # closed since it was listed
        try:
            yield copy
        finally:
            if not stat.S_ISREG(os.fstat(copy).st_mode):  # a file took the number meanwhile: the duplicate stays open
                os.close(copy)


def _endpoint(ask: Any, number: int) -> tuple[Any, ...] | None:
    """Return ``(host, port)``, IPv4 in its own form; None for what is no internet socket, or has no such end."""
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


# Python's sockets, between trainer and workers


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens where workers reach this process.

    Args:
        address: an IP address of this machine, or ``localhost``, is the only one listened at; a name or another address
            may be that of a proxy, so all of this machine's are listened at.
        port: 0 picks a free one.

    Raises:
        OSError: the port is taken.
    """
    try:
        numeric = ipaddress.ip_address("127.0.0.1" if address == "localhost" else address)
    except ValueError:
        return _anywhere(port)
    family = socket.AF_INET if numeric.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((str(numeric), 0))
    except OSError:
        return _anywhere(port)  # not of this machine: a proxy passes connections on
    return socket.create_server((str(numeric), port), family=family, backlog=1024)


def _anywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server((_ANYWHERE[0], port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server((_ANYWHERE[1], port), backlog=1024)


def dial(address: str, port: int, until: float, stop: threading.Event) -> socket.socket:
    """Return a connection to the process that listens at this address and port, as soon as one does.

    Raises:
        DeadlineError: nobody does by the monotonic moment ``until``.
        TransportError: another thread set ``stop``.
    """
    began, failure = time.monotonic(), "no attempt was made"
    for left_s in pauses(until - began, stop, shortest_s=_PAUSE_S, longest_s=_SLICE_S):
        try:
            made = in_time(partial(socket.create_connection, (address, port), max(0.1, left_s)), until, stop)
        except OSError as error:  # nobody listens; or the name is not known, and that of a service may be, soon
            failure = str(error)
        else:
            if made:
                return made[0]
    if stop.is_set():
        raise TransportError("joining the trainer was aborted", state="no group was joined")
    raise DeadlineError(
        f"no trainer (rank 0) listens at {address}:{port} after {time.monotonic() - began:.1f} s: {failure}",
        expected="the trainer calls init_all_workers_group (or open) at the same time",
        state="no group was joined",
        hint="check master_address and master_port",
    )


# calls into libraries that can neither be given a deadline nor be interrupted

_CALLS: set[Future[Any]] = set()


def run_beside(call: Callable[[], Any]) -> Future[Any]:
    """Run ``call`` in a thread of its own, and return the future of its result."""
    made = in_thread(call, "torchrl-ext-beside")
    _CALLS.add(made)
    made.add_done_callback(_CALLS.discard)
    return made


def in_time(call: Callable[[], Any], until: float, stop: threading.Event) -> list[Any]:
    """Return what ``call`` returns, as a list of one; empty when it is not back in time, or when stopped."""
    made = run_beside(call)
    while not made.done() and time.monotonic() < until and not stop.is_set():
        wait([made], _SLICE_S)
    return [made.result()] if made.done() else []


def await_calls(timeout_s: float) -> None:
    """Wait at most ``timeout_s`` seconds for the calls of `run_beside` to end."""
    wait(list(_CALLS), timeout_s)
