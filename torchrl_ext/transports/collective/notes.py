"""The notes that the ranks of a group leave for each other: names and bytes, kept by the trainer (rank 0).

The trainer's own process reads and writes them directly. A worker does so over a TCP connection:

====================================  ====================================================================
``"TXNOTES1"``, 16 random bytes       trainer, at once
16 random bytes, 32 bytes of proof    worker; HMAC-SHA256 by the secret of ``"worker"`` and the 32 random bytes
32 bytes of proof                     trainer; the same of ``"trainer"``. One who has no proof is disconnected
``length, op, key length, key, ...``  worker; lengths of 4 and 2 bytes, the most significant first
``length, found, value``              trainer; ``found`` is one byte, 1 or 0
====================================  ====================================================================

``op`` is ``S`` (set the key to the bytes that follow), ``D`` (drop it) or ``W`` (its value; if it is not there, wait as
many seconds as the 8 bytes that follow say, a float64, but at most `LONGEST_WAIT_S`).
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torchrl_ext.errors import TransportError
from torchrl_ext.transports.links import close_in_children

__all__ = [
    "GREETING",
    "LONGEST_WAIT_S",
    "NONCE_BYTES",
    "NOTE_BYTES",
    "PROOF_BYTES",
    "Notes",
    "listener",
    "proof",
]

GREETING = b"TXNOTES1"
NONCE_BYTES, PROOF_BYTES = 16, 32
NOTE_BYTES = 64 << 20
"""Bound on one note: a list of half a million parameters."""
LONGEST_WAIT_S = 0.5

_BOARD_BYTES = 4 * NOTE_BYTES
_SLICE_S = 0.05
_GREET_S, _PATIENCE_S = 10.0, 60.0
"""For those who connect to say who they are, and to take or give a note that has begun."""
_MOST_CONNECTIONS = 4096
_ANYWHERE = ("::", "0.0.0.0")


def proof(secret: str, who: bytes, nonces: bytes) -> bytes:
    """What only those can say who know the secret."""
    return hmac.digest(secret.encode(), who + nonces, "sha256")


class Notes:
    """The notes, and a listener for the workers.

    Args:
        address: where workers reach this process. One that is an address of this machine, or ``localhost``, is listened
            at alone; a name may be that of something in between, so all of this machine's are.
        port: to listen at; 0 picks a free one.
        secret: those who do not know it are not let in.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, address: str, port: int, secret: str) -> None:
        self._secret = secret
        self._held: dict[str, bytes] = {}
        self._awaited: dict[str, list[threading.Event]] = {}
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._ended = threading.Event()
        self._listener = listener(address, port)
        self._listener.settimeout(None)
        self.port: int = self._listener.getsockname()[1]
        close_in_children(self._listener)
        _start(self._accept)

    patience_s: float = 0.0
    """Nobody waits long for what is in this process; a worker does (`torchrl_ext.transports.collective.notes_link`)."""

    # the notes, for this process

    def set(self, key: str, value: bytes) -> None:
        """Leave a note.

        Raises:
            TransportError: it is too large, or there are too many.
        """
        with self._lock:
            room = _BOARD_BYTES - sum(map(len, self._held.values()))
            if len(value) > min(NOTE_BYTES, room):
                raise TransportError(
                    f"the note {key!r} has {len(value)} bytes",
                    expected=f"at most {NOTE_BYTES}, and room for it among the others: {room} bytes",
                )
            self._held[key] = value
            awaited = self._awaited.get(key, ())
            for event in awaited:
                event.set()

    def drop(self, key: str) -> None:
        """Remove a note, if it is there."""
        with self._lock:
            self._held.pop(key, None)

    def sweep(self, *beginnings: str) -> None:
        """Remove every note whose name begins with one of these."""
        with self._lock:
            for key in [key for key in self._held if key.startswith(beginnings)]:
                del self._held[key]

    def wait(self, key: str, until: float, stop: threading.Event | None = None) -> bytes | None:
        """A note, or None when it did not come until then, or ``stop`` was set."""
        with self._lock:
            if key in self._held or time.monotonic() >= until:
                return self._held.get(key)
            event = threading.Event()
            self._awaited.setdefault(key, []).append(event)
        try:
            slice_s = LONGEST_WAIT_S if stop is None else _SLICE_S
            while not event.wait(min(slice_s, max(0.0, until - time.monotonic()))):
                if time.monotonic() >= until or self._ended.is_set() or (stop is not None and stop.is_set()):
                    break
        finally:
            with self._lock:
                self._awaited[key].remove(event)
                if not self._awaited[key]:
                    del self._awaited[key]
                value = self._held.get(key)
        return value

    def close(self) -> None:
        """Let every worker go. May be called twice."""
        with self._lock:
            self._ended.set()
            ended = [self._listener, *self._connections]
        for one in ended:
            with suppress(OSError):  # a listener that is shut down lets go of the thread that accepts; others were gone
                one.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    # for the others

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed; or this process has no descriptor to spare
                self._ended.wait(_SLICE_S)
                continue
            with self._lock:
                if self._ended.is_set() or len(self._connections) >= _MOST_CONNECTIONS:
                    connection.close()
                    continue
                self._connections.add(connection)
            _start(lambda connection=connection: self._serve(connection))

    def _serve(self, connection: socket.socket) -> None:
        close_in_children(connection)
        try:
            connection.settimeout(_GREET_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._greet(connection)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            while True:
                connection.settimeout(None)
                (length,) = struct.unpack(">I", _exactly(connection, 4))
                if length > NOTE_BYTES + (1 << 16):
                    return
                connection.settimeout(_PATIENCE_S)
                value = self._answer(_exactly(connection, length))
                connection.sendall(struct.pack(">IB", 1 + len(value or b""), value is not None) + (value or b""))
        except (OSError, ValueError, struct.error, TransportError):
            return  # it is gone, has no proof, or does not speak our language; it sees its connection closed
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _greet(self, connection: socket.socket) -> None:
        own = os.urandom(NONCE_BYTES)
        connection.sendall(GREETING + own)
        nonces = own + _exactly(connection, NONCE_BYTES)
        if not hmac.compare_digest(_exactly(connection, PROOF_BYTES), proof(self._secret, b"worker", nonces)):
            raise ConnectionError("no proof")
        connection.sendall(proof(self._secret, b"trainer", nonces))

    def _answer(self, asked: bytes) -> bytes | None:
        op, length = struct.unpack_from(">cH", asked)
        key, rest = asked[3 : 3 + length].decode(), asked[3 + length :]
        if op == b"S":
            self.set(key, rest)
            return b""
        if op == b"D":
            self.drop(key)
            return b""
        (wait_s,) = struct.unpack(">d", rest)
        return self.wait(key, time.monotonic() + (wait_s if 0 <= wait_s <= LONGEST_WAIT_S else LONGEST_WAIT_S))


def listener(address: str, port: int) -> socket.socket:
    """A socket that listens where workers reach this process; ``address`` as for `Notes`."""
    try:
        numeric = ipaddress.ip_address("127.0.0.1" if address == "localhost" else address)
    except ValueError:
        return _anywhere(port)
    family = socket.AF_INET if numeric.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((str(numeric), 0))
    except OSError:
        return _anywhere(port)  # not of this machine: something in between passes connections on
    return socket.create_server((str(numeric), port), family=family, backlog=1024)


def _anywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server((_ANYWHERE[0], port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server((_ANYWHERE[1], port), backlog=1024)


def _start(call: Callable[[], None]) -> None:
    threading.Thread(target=call, name="torchrl-ext-notes", daemon=True).start()


def _exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes from a blocking socket.

    Raises:
        OSError: the connection ended before, or its timeout passed.
    """
    found = bytearray()
    while len(found) < count:
        part = connection.recv(min(count - len(found), 1 << 20))
        if not part:
            raise ConnectionError("the connection was closed")
        found += part
    return bytes(found)
