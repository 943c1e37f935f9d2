"""Connections between processes of one machine (`torchrl_ext.transports.links`): Unix sockets without a file.

Addresses are in Linux's abstract namespace (unix(7)): they vanish with the process, and a peer's death ends a wait at
once. Only processes of the same user are let in.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import select
import socket
import struct
import time
import uuid
from typing import Any

from torchrl_ext.errors import ConfigError, TransportError
from torchrl_ext.transports.links import Link, close_in_children

__all__ = ["Listener", "connect", "link_to", "new_address", "shared_address"]

_ADDRESS = re.compile(r"torchrl_ext-ipc2-[0-9]+-[0-9a-f]{32}")


def new_address() -> str:
    """An address that nobody else uses."""
    return f"torchrl_ext-ipc2-{os.geteuid()}-{uuid.uuid4().hex}"


def shared_address(channel: str) -> str:
    """The address at which this user's ends with the same channel name meet."""
    return f"torchrl_ext-ipc2-{os.geteuid()}-{hashlib.sha256(channel.encode()).hexdigest()[:32]}"


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
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while poll.poll(max(0.0, until - time.monotonic()) * 1e3):
            with contextlib.suppress(BlockingIOError, TransportError):
                return link_to(self._socket.accept()[0], "a worker")
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
    return link_to(endpoint, "the trainer")


def link_to(endpoint: socket.socket, what: str) -> Link:
    """A link to a process of this user (or of root's).

    Args:
        endpoint: a connected Unix socket.
        what: who is at the other end, for messages: ``"the trainer"``; its process number is added.

    Raises:
        TransportError: the other end belongs to another user.
    """
    raw = endpoint.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    if uid not in (os.geteuid(), 0):
        endpoint.close()
        raise TransportError(
            f"{what} (pid {pid}) belongs to user {uid}",
            expected=f"user {os.geteuid()}, as here",
            state="nothing was read",
        )
    return Link(endpoint, f"{what} (pid {pid})")
