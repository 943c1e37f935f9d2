"""Connections between processes of one machine: Unix sockets without a file, JSON lines both ways.

Addresses are in Linux's abstract namespace (unix(7)): they vanish with the process, and a peer's death ends a wait at
once. Only processes of the same user are let in.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import select
import socket
import struct
import time
import uuid
from typing import Any

from torchrl_ext.errors import ConfigError, DeadlineError, IntegrityError, NotConnectedError, TransportError
from torchrl_ext.transports.ipc.host_memory import close_in_children
from torchrl_ext.types import Info

__all__ = ["Link", "Listener", "connect", "new_address", "shared_address"]

_ADDRESS = re.compile(r"torchrl_ext-ipc-[0-9]+-[0-9a-f]{32}")
_LONGEST_LINE = 256 << 20  # a list of a million parameters


def new_address() -> str:
    """An address that nobody else uses."""
    return f"torchrl_ext-ipc-{os.geteuid()}-{uuid.uuid4().hex}"


def shared_address(channel: str) -> str:
    """The address at which this user's ends with the same channel name meet."""
    return f"torchrl_ext-ipc-{os.geteuid()}-{hashlib.sha256(channel.encode()).hexdigest()[:32]}"


class Link:
    """One connection.

    Args:
        endpoint: a connected socket.
        what: who the other end is, for messages: ``"the trainer"``.

    Raises:
        TransportError: the other end belongs to another user.
    """

    def __init__(self, endpoint: socket.socket, what: str) -> None:
        self._socket, self._buffer = endpoint, bytearray()
        raw = endpoint.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid, uid, _ = struct.unpack("3i", raw)
        self.name = f"{what} (pid {self.pid})"
        if uid not in (os.geteuid(), 0):
            self.close()
            raise TransportError(
                f"{self.name} belongs to user {uid}", expected=f"user {os.geteuid()}, as here", state="nothing was read"
            )
        endpoint.setblocking(False)
        close_in_children(self)

    def fileno(self) -> int:
        """For `select.poll`; -1 when closed."""
        return self._socket.fileno()

    @property
    def alive(self) -> bool:
        """Whether both ends are open."""
        return self.fileno() >= 0 and not _events(self._socket, select.POLLRDHUP, 0.0)

    def send(self, message: Info, until: float) -> None:
        """Send one message.

        Raises:
            NotConnectedError: the other end is gone.
            DeadlineError: it does not read; the connection is closed, for it may have got a part.
        """
        rest = memoryview(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        while rest:
            try:
                rest = rest[self._socket.send(rest, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                if not _events(self._socket, select.POLLOUT, until - time.monotonic()):
                    self.close()
                    raise DeadlineError(f"{self.name} does not read what it is told") from None
            except OSError as error:
                raise self._gone(error) from error

    def read(self, until: float) -> Info | None:
        """The next message, or None when none came in time.

        Raises:
            NotConnectedError: the other end is gone, and everything that it said was read.
            IntegrityError: it does not speak our language.
        """
        scanned = 0
        while True:
            end = self._buffer.find(b"\n", scanned)
            if end >= 0:
                line, self._buffer = self._buffer[:end], self._buffer[end + 1 :]
                return self._parsed(line)
            scanned = len(self._buffer)
            if scanned > _LONGEST_LINE:
                raise IntegrityError(f"{self.name} sends a message of more than {_LONGEST_LINE} bytes")
            if self.fileno() < 0:
                raise self._gone("closed")
            if not _events(self._socket, select.POLLIN | select.POLLRDHUP, until - time.monotonic()):
                return None
            try:
                data = self._socket.recv(1 << 18)
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._gone(error) from error
            if not data:
                raise self._gone("it closed the connection, or died")
            self._buffer += data

    def end(self) -> None:
        """Let a wait in another thread see the connection closed."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end. May be called twice."""
        self._socket.close()

    def _parsed(self, line: bytearray) -> Info:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise IntegrityError(
                f"{self.name} sent what is no JSON object", expected="a trainer or worker of torchrl_ext"
            )
        return message

    def _gone(self, why: Any) -> NotConnectedError:
        return NotConnectedError(f"{self.name} is gone: {why}", hint="connect again when it is back")


class Listener:
    """Where workers come in.

    Args:
        address: from `new_address` or `shared_address`.

    Raises:
        TransportError: another process listens there.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind("\0" + address)
        except OSError as error:
            self._socket.close()
            raise TransportError(
                f"another trainer of this user sends on this channel ({address}): {error}",
                state="nothing was sent",
                hint="shut that one down, or give both ends of this one a channel name of their own",
            ) from error
        self._socket.listen(1024)
        close_in_children(self)

    def accept(self, until: float) -> Link | None:
        """The next connection, or None when none came in time."""
        while _events(self._socket, select.POLLIN, until - time.monotonic()):
            with contextlib.suppress(BlockingIOError, TransportError):
                return Link(self._socket.accept()[0], "a worker")
        return None

    def close(self) -> None:
        """Close. May be called twice."""
        self._socket.close()


def connect(address: Any) -> Link | None:
    """Connect to the trainer at ``address``; None where nobody listens (yet).

    Raises:
        ConfigError: that is no address of ours, or this system has none.
        TransportError: who listens there is another user.
    """
    if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
        raise ConfigError(f"{address!r} is no address of a trainer", expected="the info of Transport.open")
    endpoint = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    endpoint.setblocking(False)
    try:
        endpoint.connect("\0" + address)
    except OSError:  # nobody there, or too many at once: either way, try again
        endpoint.close()
        return None
    return Link(endpoint, "the trainer")


def _events(endpoint: socket.socket, wanted: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(endpoint, wanted)
    return bool(poll.poll(max(0.0, timeout_s) * 1e3))
