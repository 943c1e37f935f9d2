"""Connections between processes: JSON objects both ways, each behind its length in 4 bytes (most significant first).

Between machines they are TCP; on one machine, Unix sockets without a file. Those have addresses in Linux's abstract
namespace (unix(7)), which vanish with the process, and only processes of the same user are let in. A peer's death ends
a wait at once.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import json
import os
import re
import select
import socket
import struct
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import ConfigError, NotConnectedError, TransportError
from torchrl_ext.base.types import Info
from torchrl_ext.data.group.calls import in_time

__all__ = [
    "Link", "LocalListener", "close_in_children", "connect_locally", "dial", "listen", "new_address", "ranks_text",
    "serve", "shared_address",
]  # fmt: skip

LONGEST_BYTES = 256 << 20
"""Bound on one message, in bytes: enough for a list of a million parameters."""

_PROTOCOL = "ipc4"
_LOCAL_ADDRESS = re.compile(rf"torchrl_ext-{_PROTOCOL}-[0-9]+-[0-9a-f]{{32}}")
_MOST_STRANGERS = 1024  # as many as may wait at once
_TURN = struct.pack("@ll", 0, 50_000)  # for how long connecting waits behind those who crowd an address, as a timeval
_BACKLOG = 1024
_PAUSE_S, _SLICE_S = 0.001, 0.05
_NO_ROOM_S = 0.05
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
_PROBES = {
    getattr(socket, name): value
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
    if name in vars(socket)
}
"""Options by which the kernel gives up a machine that answers nothing for 40 s, and ends every read of a connection."""
_HUNG_UP: int = getattr(select, "POLLRDHUP", select.POLLHUP)  # macOS says so with POLLHUP


class Link:
    """One end of a connection, at which one thread may read while another one writes.

    Args:
        connection: a connected socket, owned from here on.
        peer: who is at the other end, for messages: ``"the trainer"``.
        longest_bytes: bound on a message from there.
    """

    def __init__(self, connection: socket.socket, peer: str, *, longest_bytes: int = LONGEST_BYTES) -> None:
        self._socket, self.peer, self.longest_bytes = connection, peer, longest_bytes
        self._received = bytearray()
        self._owner = os.getpid()
        if connection.family != getattr(socket, "AF_UNIX", None):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _PROBES.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setblocking(False)
        close_in_children(self)

    def fileno(self) -> int:
        """Return the descriptor, for `select.poll`; -1 when closed."""
        return self._socket.fileno()

    @property
    def alive(self) -> bool:
        """Whether neither end has closed the link, as its socket shows without a message."""
        try:
            return not self._ready(_HUNG_UP, Deadline(0.0))
        except NotConnectedError:
            return False

    def send(self, message: Info, within: Deadline) -> None:
        """Send one message.

        Raises:
            NotConnectedError: the other end is gone.
            DeadlineError, TransportError: it does not read; the connection is closed, for it may have got a part.
        """
        data = json.dumps(message, separators=(",", ":")).encode()
        rest = memoryview(len(data).to_bytes(4, "big") + data)
        while rest:
            try:
                rest = rest[self._socket.send(rest, getattr(socket, "MSG_NOSIGNAL", 0)) :]
            except BlockingIOError:
                if self._ready(select.POLLOUT, within):
                    continue
                self.close()
                raise within.error(
                    f"{self.peer} did not read a message of {len(data):,} bytes",
                    expected="a running process, which reads each message as it arrives",
                    state="the connection was closed, because a part of the message may have arrived",
                    hint="find out why that process hangs, or restart it",
                ) from None
            except OSError as error:
                raise self._gone(error) from error

    def read(self, within: Deadline | None) -> Info | None:
        """Return the next message, or None when none came within the deadline.

        Without a deadline it waits for as long as the other end lives.

        Raises:
            NotConnectedError: the other end is gone, and everything that it sent was read.
            TransportError: it does not follow the protocol; the connection is closed.
        """
        while True:
            size = int.from_bytes(self._received[:4], "big")
            if size > self.longest_bytes:
                raise self._foreign(f"announces a message of {size:,} bytes")
            if len(self._received) >= 4 + size:
                try:
                    message = json.loads(bytes(self._received[4 : 4 + size]))
                except (ValueError, RecursionError):
                    message = None
                del self._received[: 4 + size]
                if not isinstance(message, dict):
                    raise self._foreign("sent something other than a JSON object")
                return message
            if not self._ready(select.POLLIN | _HUNG_UP, within):
                return None
            try:
                data = self._socket.recv(1 << 18)
            except BlockingIOError:  # another thread took it
                continue
            except OSError as error:
                raise self._gone(error) from error
            if not data:
                raise self._gone("it closed the connection, or ended")
            self._received += data

    def close(self) -> None:
        """Close this end; waits in other threads, at either end, end too. May be called twice."""
        if self._owner == os.getpid():  # else it is the parent's, which a forked child leaves alone
            with contextlib.suppress(OSError):  # the other end was first
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _ready(self, events: int, within: Deadline | None) -> bool:
        """Wait for one of ``events``; False at the deadline.

        Raises:
            NotConnectedError: this end was closed.
        """
        poll = select.poll()
        try:
            poll.register(self._socket, events)
        except ValueError as error:
            raise self._gone("this end closed the connection") from error
        while not poll.poll(None if within is None else 1e3 * min(_SLICE_S, within.left_s)):
            if within is not None and within.over:
                return False
        return True

    def _foreign(self, does: str) -> TransportError:
        self.close()
        return TransportError(
            f"{self.peer} {does}",
            expected="a process of the same version of torchrl_ext",
            state="the connection was closed",
            hint="check the address, and use one version on both ends",
        )

    def _gone(self, how: Any) -> NotConnectedError:
        return NotConnectedError(f"{self.peer} is gone: {how}", hint="connect again when it is back")


def serve(listener: socket.socket, met: Callable[[socket.socket, Any], None], name: str) -> None:
    """Call ``met`` with each connection and its address, in a thread ``name``, until ``listener`` is shut down."""

    def accept() -> None:
        pause = threading.Event()
        while True:
            try:
                connection, address = listener.accept()
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    return  # it was closed
                pause.wait(_NO_ROOM_S)
                continue
            threading.Thread(target=met, args=(connection, address), name=name, daemon=True).start()

    listener.settimeout(None)
    threading.Thread(target=accept, name=name, daemon=True).start()


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
        family = socket.AF_INET if numeric.version == 4 else socket.AF_INET6
        return socket.create_server((str(numeric), port), family=family, backlog=_BACKLOG)
    except ValueError:
        pass  # a name
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", port), backlog=_BACKLOG)


def dial(address: str, port: int, within: Deadline, failure: str = "no attempt was made") -> socket.socket:
    """Return a connection to the process that listens at this address and port, as soon as one does.

    Args:
        failure: why the attempt before failed, for the error.

    Raises:
        DeadlineError: nobody does in time.
        TransportError: another thread ended the wait.
    """
    for left_s in within.pauses(shortest_s=_PAUSE_S, longest_s=_SLICE_S):
        try:
            made = in_time(partial(socket.create_connection, (address, port), max(0.1, left_s)), within)
        except OSError as error:  # nobody listens; or the name is not known, and that of a service may be, soon
            failure = str(error)
        else:
            if made:
                return made[0]
    raise within.error(
        f"no trainer (rank 0) listened at {address}:{port} ({failure})",
        expected="the trainer calls init_all_workers_group (or open) at the same time",
        state="no group was joined",
        hint="check master_address and master_port",
    )


def new_address() -> str:
    """Return an address that nobody else uses."""
    return f"torchrl_ext-{_PROTOCOL}-{os.geteuid()}-{uuid.uuid4().hex}"


def shared_address(channel: str) -> str:
    """Return the address at which this user's ends with the same channel name meet."""
    return f"torchrl_ext-{_PROTOCOL}-{os.geteuid()}-{hashlib.sha256(channel.encode()).hexdigest()[:32]}"


class LocalListener:
    """Listens for workers of this machine, at an address from `new_address` or `shared_address`.

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
                f"{_holder(address)} already listens on this channel ({address}): {error}",
                state="nothing was sent",
                hint="end that process, or give both ends of this transport another channel name",
            ) from error
        self._socket.listen(_MOST_STRANGERS)
        close_in_children(self)

    def accept(self, within: Deadline) -> Link | None:
        """Return the next connection, or None when none came within the deadline, or only ones of other users.

        Raises:
            TransportError: this process may open no more files.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        for _ in range(_MOST_STRANGERS):  # any user may connect, again and again, and everybody has a deadline
            if not poll.poll(1e3 * within.left_s):
                break
            try:
                return _link_to(self._socket.accept()[0], "a worker")
            except (BlockingIOError, ConnectionAbortedError, TransportError):
                continue
            except OSError as error:
                raise TransportError(
                    f"no worker can connect at {self.address}: {error}",
                    state="nothing was sent to workers that wait there",
                    hint="raise this process's limit of open files (ulimit -n), or find out what holds them",
                ) from error
        return None

    def close(self) -> None:
        """Stop listening. May be called twice."""
        self._socket.close()


def connect_locally(address: Any) -> Link | None:
    """Connect to the trainer at ``address``; None where nobody listens (yet).

    Raises:
        ConfigError: ``address`` is no address of a trainer.
        TransportError: who listens there is another user.
    """
    if not isinstance(address, str) or not _LOCAL_ADDRESS.fullmatch(address):
        raise ConfigError(
            f"{address!r:.200} is not the address of a trainer that speaks {_PROTOCOL}",
            expected="the info of Transport.open",
            state="nothing was received",
            hint="use one release of torchrl_ext in trainer and engine",
        )
    endpoint = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TURN)
    try:
        endpoint.connect("\0" + address)
    except OSError:  # nobody there, or still too many at once: either way, try again
        endpoint.close()
        return None
    return _link_to(endpoint, "the trainer")


def _link_to(endpoint: socket.socket, what: str) -> Link:
    """Return a link over a connected Unix socket; ``what``, at the other end, is a process of this user or of root."""
    pid, uid = _owner(endpoint)
    if uid not in (os.geteuid(), 0):
        endpoint.close()
        raise TransportError(
            f"{what} (pid {pid}) belongs to user {uid}",
            expected=f"user {os.geteuid()}, as here",
            state="nothing was read",
        )
    return Link(endpoint, f"{what} (pid {pid})")


def _owner(endpoint: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end of a connected Unix socket."""
    raw = endpoint.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def _holder(address: str) -> str:
    """Return whose an address is, which any user may have taken first."""
    with socket.socket(socket.AF_UNIX) as endpoint:
        endpoint.setblocking(False)
        try:
            endpoint.connect("\0" + address)
        except OSError:
            return "another process, perhaps of another user,"
        pid, uid = _owner(endpoint)
    return f"another process of this user (pid {pid})" if uid == os.geteuid() else f"user {uid} (pid {pid})"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as messages name them: ``"rank 2"``, or ``"ranks 2, 3"``."""
    listed = sorted(ranks)
    return ("rank " if len(listed) == 1 else "ranks ") + ", ".join(map(str, listed))


_OURS: weakref.WeakSet[Any] = weakref.WeakSet()


def close_in_children(resource: Any) -> None:
    """Close ``resource`` in every forked child, which else would keep it open after this process has died."""
    _OURS.add(resource)


def _close_all() -> None:
    for resource in list(_OURS):
        resource.close()


os.register_at_fork(after_in_child=_close_all)
