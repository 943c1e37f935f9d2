"""This process's own TCP sockets, for what neither gloo nor `TCPStore` offers: a way to end a wait.

Works where ``/dev/fd`` lists open files (Linux, macOS); elsewhere nothing is found and the backends' timeouts remain.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

__all__ = ["connected", "endpoint", "limit_waits", "listening", "shut_down"]


def tcp_sockets() -> Iterator[socket.socket]:
    """Duplicates of this process's internet sockets, to be closed by the caller."""
    if socket.getdefaulttimeout() is not None:
        return  # looking at a socket would then make it non-blocking
    try:
        entries = os.listdir("/dev/fd")
    except OSError:
        return
    for entry in entries:
        try:
            copy = os.dup(int(entry))
        except OSError:
            continue
        try:
            one = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
            yield one
        else:
            one.close()


def listening() -> Iterator[tuple[Any, ...]]:
    """Where this process listens."""
    for one in tcp_sockets():
        with one:
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield endpoint(one.getsockname())


def endpoint(address: tuple[Any, ...]) -> tuple[Any, ...]:
    """``(host, port)``, IPv4 addresses in their own form."""
    return (str(address[0]).removeprefix("::ffff:"), address[1])


def connected(endpoints: set[tuple[Any, ...]]) -> Iterator[socket.socket]:
    """Duplicates, closed after use, of connections that begin or end at one of ``endpoints``."""
    for one in tcp_sockets():
        with one:
            try:
                ends = {endpoint(one.getsockname()), endpoint(one.getpeername())}
            except OSError:
                continue  # not connected
            if ends & endpoints:
                yield one


def shut_down(endpoints: set[tuple[Any, ...]]) -> None:
    """End every connection that begins or ends at one of ``endpoints``; whoever waits on one sees it closed."""
    for one in connected(endpoints):
        try:
            one.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # closed meanwhile


def limit_waits(endpoints: set[tuple[Any, ...]], timeout_s: float) -> None:
    """Let reads and writes on these connections fail after ``timeout_s`` instead of waiting for a frozen peer."""
    value = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    for one in connected(endpoints):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
