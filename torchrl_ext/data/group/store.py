"""A key store for one connection of a transport: hosted by the trainer, read and written by workers with its secret.

Every message is a JSON object in a frame of `multiprocessing.connection.Connection`: its length in 4 bytes, most
significant first, and its text. Nothing is pickled.

================================================  ================================================================
``{"nonce": hex}``                                trainer, at once; 16 random bytes
``{"nonce": hex, "proof": hex}``                  worker; HMAC-SHA256 by the secret of ``"worker"`` and both nonces,
                                                  the trainer's first
``{"proof": hex}``                                trainer; the same of ``"trainer"``. It disconnects whoever has no
                                                  proof
``{"do": "set", "key", "value", "keep"}``         worker: set a value; with ``keep`` only if the key has none
``{"do": "drop", "key"}``                         worker: remove a key, or all that begin so where it ends in ``/``
``{"do": "will", "key", "value"}``                worker: set the value, if there is none, when this connection ends
``{"do": "find", "key", "number", "wait"}``       worker: answer ``{"number", "value"}``; without a value ``{"number"}``
                                                  at once and, with ``wait``, ``{"number", "value"}`` once it is set
``{"do": "leave", "key", "number"}``              worker: waits for that answer no longer
``{"reason": text}``                              trainer: the connection ended, and why; the last message
================================================  ================================================================
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import os
import secrets
import select
import socket
import struct
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Literal, TypeVar, final

import msgspec

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import NotConnectedError, TransportError, WeightSyncError
from torchrl_ext.data.group.calls import in_time

__all__ = [
    "LONGEST_BYTES", "LOST", "VALUE_BYTES", "Channel", "HostedStore", "KeyStore", "RemoteStore", "bound",
    "close_in_children", "connected_to", "dial", "listen", "serve",
]  # fmt: skip

LOST = "lost"
"""The key of the reason for which a store ended; the first one stays, and every rank learns of it."""

VALUE_BYTES = 64 << 20
"""Bound on one value: a list of half a million parameters."""

LONGEST_BYTES = 256 << 20
"""Bound on a message of a `Channel`: a list of a million parameters."""

_STORE_BYTES = 4 * VALUE_BYTES
_GREETING_BYTES = 1024
_KEY_BYTES = 4096
_GREET_S, _PATIENCE_S, _GOODBYE_S = 10.0, 60.0, 1.0
"""Seconds that a stranger has to prove itself, that a worker has to read an answer, and the last message."""
_MOST_CONNECTIONS, _MOST_QUESTIONS = 4096, 4096
_PAUSE_S, _SLICE_S, _LONGEST_S = 0.001, 0.05, 86_400.0
_BACKLOG = 1024
_PROBES = {
    getattr(socket, name): value
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
    if name in vars(socket)
}
"""The kernel gives up a machine that answers nothing for 40 s, and ends every read from it."""
_HUNG_UP: int = getattr(select, "POLLRDHUP", select.POLLHUP)  # macOS says so with POLLHUP

_NOTHING = msgspec.Raw()  # one object, by which msgspec sees that a field is left out

T = TypeVar("T")


@final
class Channel:
    """One end of a connection that carries JSON messages; one thread may read it while others write.

    Args:
        connected: a connected socket, owned from here on.
        peer: the other end's name in messages.
        longest_bytes: bound on a message from there.
    """

    def __init__(self, connected: socket.socket, peer: str, *, longest_bytes: int = LONGEST_BYTES) -> None:
        self.peer, self.longest_bytes, self._owner = peer, longest_bytes, os.getpid()
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _PROBES.items():
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        self._writing = threading.Lock()
        with _forking:
            self._connection = Connection(connected.detach())
            close_in_children(self)

    @property
    def alive(self) -> bool:
        """Whether neither end has closed the connection, as its socket shows without a message."""
        if self._connection.closed:
            return False
        poll = select.poll()
        poll.register(self._connection.fileno(), _HUNG_UP)
        return not poll.poll(0)

    def send(self, message: Any, within: Deadline) -> None:
        """Send a message: a JSON object, or a struct of msgspec.

        Raises:
            NotConnectedError: the other end is gone.
            DeadlineError, TransportError: it does not read; the connection is closed, for it may have got a part.
        """
        data = _encoded(message)
        try:
            with self._writing:
                self._limit(socket.SO_SNDTIMEO, within.left_s)
                self._connection.send_bytes(data)
        except BlockingIOError:
            self.close()
            raise within.error(
                f"{self.peer} did not read a message of {len(data):,} bytes",
                expected="a running process, which reads each message as it arrives",
                state="the connection was closed, because a part of the message may have arrived",
                hint="find out why that process hangs, or restart it",
            ) from None
        except OSError as error:
            raise self._gone(error) from error

    def read(self, within: Deadline | None, kind: type[T] = dict) -> T | None:  # type: ignore[assignment]
        """Return the next message, or None when none came within the deadline; without one it waits for ever.

        Raises:
            NotConnectedError: the other end is gone, and everything that it sent was read.
            TransportError: it does not follow the protocol, or stopped in a message; the connection is closed.
        """
        try:
            while not self._connection.poll(None if within is None else min(_SLICE_S, within.left_s)):
                if within is not None and within.over:
                    return None
            self._limit(socket.SO_RCVTIMEO, _LONGEST_S if within is None else max(_SLICE_S, within.left_s))
            data = self._connection.recv_bytes(self.longest_bytes)
            return msgspec.json.decode(data, type=kind)
        except EOFError as error:
            raise self._gone("it closed the connection, or ended") from error
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            raise self._foreign("sent something other than a JSON message of ours") from None
        except BlockingIOError:
            raise self._foreign("stopped in the middle of a message") from None
        except OSError as error:
            if error.errno is None and not self._connection.closed:  # of `Connection`, for a size
                raise self._foreign(f"announces a message of more than {self.longest_bytes:,} bytes") from None
            raise self._gone(error) from error

    def close(self) -> None:
        """Close this end; waits in other threads, at either end, end too. May be called twice."""
        if self._owner != os.getpid():  # the connection is the parent's
            self._connection.close()
            return
        with suppress(OSError), self._socket() as connected:  # the other end was first
            connected.shutdown(socket.SHUT_RDWR)  # the descriptor goes with this object: another thread may read it

    def _limit(self, option: int, seconds: float) -> None:
        seconds = min(max(seconds, 0.001), _LONGEST_S)
        with self._socket() as connected:
            connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6)))

    @contextmanager
    def _socket(self):  # type: ignore[no-untyped-def]
        connected = socket.socket(fileno=self._connection.fileno())
        try:
            yield connected
        finally:
            connected.detach()

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


class _Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A request of a worker, as listed above."""

    do: Literal["set", "drop", "find", "leave", "will"]
    key: str
    value: msgspec.Raw = _NOTHING
    keep: bool = False
    number: int = 0
    wait: bool = False


class _Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An answer of the trainer to the question of a number, or the reason for which the connection ended."""

    number: int = 0
    value: msgspec.Raw = _NOTHING
    reason: str = ""


class KeyStore(ABC):
    """JSON values by key, which every rank of a connection can read: `HostedStore` and `RemoteStore`.

    The store ends when one rank closes it with a reason, or leaves a reason under `LOST` as its `RemoteStore.will`.

    Attributes:
        host, port, address: where workers reach the trainer.
        secret: known only to trainer and workers; "" lets in whoever finds the address.
    """

    def __init__(self, host: str, port: int, secret: str) -> None:
        self.host, self.port, self.secret, self.address = host, port, secret, f"{host}:{port}"
        self._owner, self._reason, self._changed = os.getpid(), "", threading.Condition()

    def set(self, key: str, value: Any, *, keep: bool = False) -> None:
        """Set a value, any but None; with ``keep`` only if the key has none.

        Raises:
            TransportError: it is too large, or there are too many values.
            NotConnectedError: the store ended.
        """
        data = _encoded(value)
        if len(data) > VALUE_BYTES or len(key) > _KEY_BYTES:
            raise TransportError(f"the value of {key[:99]!r} has {len(data)} bytes", expected=f"at most {VALUE_BYTES}")
        self._do(_Request(do="set", key=key, value=msgspec.Raw(data), keep=keep))

    def drop(self, key: str) -> None:
        """Remove a key, if it is there; every key that begins with ``key`` where that ends in ``/``."""
        self._do(_Request(do="drop", key=key))

    def collect(self, beginning: str, ranks: Iterable[int], within: Deadline) -> dict[int, Any]:
        """Wait for the value of ``beginning + rank`` of each rank, and return those that came while the store lived."""
        found: dict[int, Any] = {}
        for rank in ranks:
            with suppress(NotConnectedError):
                found[rank] = self.find(f"{beginning}{rank}", within)
        return {rank: value for rank, value in found.items() if value is not None}

    def lost(self, within: Deadline | None = None) -> str:
        """Return why the store ended, at the deadline at the latest; "" while it has not."""
        while within is not None and not self._reason and not within.over:
            with self._changed:
                self._changed.wait(min(_SLICE_S, within.left_s))
        return self._reason

    @abstractmethod
    def find(self, key: str, within: Deadline | None = None) -> Any:
        """Return the value of a key, or None if it has none by the deadline; by default it does not wait.

        Raises:
            NotConnectedError: the store ended, and it has no such value here; gives the reason.
        """

    @abstractmethod
    def close(self, reason: str = "") -> None:
        """End this end of the store, and with a reason, or as the trainer, the store. May be called twice."""

    @abstractmethod
    def _do(self, request: _Request) -> None: ...

    def _ended(self) -> NotConnectedError:
        return NotConnectedError(
            f"the connection between trainer and workers at {self.address} ended: {self._reason}",
            state="every version that was received completely is intact",
            hint="connect again when every rank is up",
        )


class _Peer:
    """A worker's connection, as the trainer has it: one thread reads it, another one writes to it."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.answers: SimpleQueue[_Answer | None] = SimpleQueue()
        self.questions: dict[int, str] = {}  # keys that it waits for
        self.writer: threading.Thread | None = None

    def write(self) -> None:
        with suppress(WeightSyncError):
            while (answer := self.answers.get()) is not None:
                self.channel.send(answer, Deadline(_PATIENCE_S))
        self.channel.close()


@final
class HostedStore(KeyStore):
    """Holds the values and listens for workers (trainer end).

    Args:
        host, port, secret: as in `KeyStore`; port 0 picks a free one.

    Raises:
        TransportError: another process listens there.
    """

    def __init__(self, host: str, port: int, secret: str) -> None:
        try:
            listener = listen(host, port)
        except OSError as error:
            raise TransportError(
                f"the trainer cannot listen at {host}:{port}: {error}",
                state="no group was formed, and nothing was sent",
                hint="pick another master_port, or 0 for a free one",
            ) from error
        super().__init__(host, listener.getsockname()[1], secret)
        self._values: dict[str, msgspec.Raw] = {}
        self._peers: set[_Peer] = set()
        self._closed = False
        self._stop_listening = serve(listener, self._serve, "torchrl-ext-store")

    def find(self, key: str, within: Deadline | None = None) -> Any:
        within = within or Deadline(0.0)
        with self._changed:
            while key not in self._values and not self._reason and not within.over:
                self._changed.wait(min(_SLICE_S, within.left_s))
            if key not in self._values and self._reason:
                raise self._ended()
            return _decoded(self._values.get(key, _NOTHING))

    def close(self, reason: str = "") -> None:
        if self._owner != os.getpid():
            return
        self.set(LOST, reason or "the trainer closed it", keep=True)
        with self._changed:
            self._closed, peers = True, [*self._peers]
        within = Deadline(_GOODBYE_S)
        for peer in peers:
            peer.answers.put(None)
        for peer in peers:
            if peer.writer is not None:
                peer.writer.join(within.left_s)
            peer.channel.close()

    def _do(self, request: _Request, peer: _Peer | None = None) -> None:
        key, number = request.key, request.number
        with self._changed:
            if request.do == "set":
                self._set(key, request.value, request.keep)
            elif request.do == "drop":
                for name in [name for name in self._values if name.startswith(key)] if key.endswith("/") else [key]:
                    self._values.pop(name, None)
            elif peer is not None and request.do == "find":
                value = self._values.get(key, _NOTHING)
                if not value and request.wait:
                    peer.questions[number] = key
                peer.answers.put(_Answer(number=number, value=value))
            elif peer is not None:
                peer.questions.pop(number, None)

    def _set(self, key: str, value: msgspec.Raw, keep: bool) -> None:
        if keep and key in self._values:
            return
        room = _STORE_BYTES - sum(len(name) + len(memoryview(own)) for name, own in self._values.items() if name != key)
        if len(key) + len(memoryview(value)) > room and key != LOST:
            raise TransportError(
                f"the value of {key[:99]!r} has {len(memoryview(value))} bytes",
                expected=f"at most the {room} bytes that are left for values",
            )
        self._values[key] = value
        if key == LOST and not self._reason:
            self._reason = str(_decoded(value)) or "no reason was given"
            self._stop_listening()  # whoever comes from now on waits for the next store
            for peer in self._peers:
                peer.answers.put(_Answer(reason=self._reason))
        for peer in self._peers:
            for number in [number for number, asked in peer.questions.items() if asked == key]:
                del peer.questions[number]
                peer.answers.put(_Answer(number=number, value=value))
        self._changed.notify_all()

    def _serve(self, connected: socket.socket, where: Any) -> None:
        peer = _Peer(Channel(connected, f"a worker at {where[0]}"))
        with self._changed:
            if self._closed or len(self._peers) >= _MOST_CONNECTIONS:
                peer.channel.close()
                return
            self._peers.add(peer)
        will: _Request | None = None
        try:
            self._prove(peer.channel)
            with self._changed:
                if self._reason:
                    peer.answers.put(_Answer(reason=self._reason))
                peer.writer = threading.Thread(target=peer.write, name="torchrl-ext-store", daemon=True)
                peer.writer.start()
            while (request := peer.channel.read(None, _Request)) is not None:
                if len(peer.questions) + peer.answers.qsize() > _MOST_QUESTIONS:
                    break
                if request.do == "will":
                    will = msgspec.structs.replace(request, do="set", keep=True)
                    continue
                try:
                    self._do(request, peer)
                except TransportError as error:  # there is no room
                    self.set(LOST, f"of {peer.channel.peer}, {error}", keep=True)
        except WeightSyncError:  # it is gone, or does not follow the protocol: it sees its connection closed
            pass
        finally:
            with self._changed:
                self._peers.discard(peer)
            peer.answers.put(None)
            peer.channel.close()
            if will is not None:
                with suppress(TransportError):  # there is no room
                    self._do(will)

    def _prove(self, channel: Channel) -> None:
        own, within = secrets.token_hex(16), Deadline(_GREET_S)
        channel.longest_bytes = _GREETING_BYTES
        channel.send({"nonce": own}, within)
        theirs: dict[str, Any] = channel.read(within) or {}
        nonces = own + str(theirs.get("nonce"))
        if not _same(theirs.get("proof"), _proof(self.secret, "worker", nonces)):
            raise TransportError(f"{channel.peer} does not know the secret")
        channel.send({"proof": _proof(self.secret, "trainer", nonces)}, within)
        channel.longest_bytes = VALUE_BYTES + 6 * _KEY_BYTES + _GREETING_BYTES


@final
class RemoteStore(KeyStore):
    """A worker's connection to the store of its trainer.

    Args:
        host, port, secret: as in `KeyStore`.
        within: deadline for the trainer to listen and to answer; each later answer may take as many seconds.

    Attributes:
        patience_s: how long the trainer may take to answer a question or to read one, in seconds.

    Raises:
        DeadlineError: no trainer listens at the address, or the process that listens does not answer.
        TransportError: the trainer has another secret, or another thread ended the wait.
    """

    def __init__(self, host: str, port: int, secret: str, within: Deadline) -> None:
        super().__init__(host, port, secret)
        self.patience_s, self._number = within.timeout_s, 0
        self._answers: dict[int, list[msgspec.Raw]] = {}
        failure = "no attempt was made"
        for _ in within.pauses(shortest_s=_PAUSE_S, longest_s=_SLICE_S):
            self._channel = Channel(dial(host, port, within, failure), f"the process that listens at {self.address}")
            try:
                proved = self._prove(within)
            except NotConnectedError as error:  # a trainer that is just leaving; the next one may listen soon
                failure = error.what
                continue
            except TransportError:  # no message of ours
                proved = False
            if not proved:
                self._channel.close()
                if proved is None:
                    break
                raise TransportError(
                    f"{self._channel.peer} refused this worker",
                    expected="a trainer of the same version of torchrl_ext, with the same secret",
                    state="no group was joined",
                    hint="check the address and the port, and give every rank the same secret; a trainer that sends "
                    "through an engine client makes one for the engines",
                )
            self._channel.peer = f"the trainer (rank 0) at {self.address}"
            threading.Thread(target=self._listen, name="torchrl-ext-store", daemon=True).start()
            return
        raise within.error(
            f"the process that listens at {self.address} did not answer",
            expected="a trainer (rank 0) that runs",
            state="no group was joined",
            hint="check the address and the port, and that the trainer does not hang",
        )

    def _prove(self, within: Deadline) -> bool | None:
        """Return whether both ends have proved to each other that they know the secret; None where the other is silent.

        Raises:
            NotConnectedError: the other end left before it said a word.
        """
        greeting, own = self._channel.read(within), secrets.token_hex(16)
        if greeting is None:
            return None
        nonces = str(greeting.get("nonce")) + own
        try:
            self._channel.send({"nonce": own, "proof": _proof(self.secret, "worker", nonces)}, within)
            answer = self._channel.read(within)
        except NotConnectedError:  # it disconnects whoever has another secret
            return False
        return None if answer is None else _same(answer.get("proof"), _proof(self.secret, "trainer", nonces))

    def _listen(self) -> None:
        try:
            while (answer := self._channel.read(None, _Answer)) is not None:
                with self._changed:
                    self._reason = self._reason or answer.reason  # last words may still be set
                    if answer.number in self._answers:
                        self._answers[answer.number].append(answer.value)
                    self._changed.notify_all()
        except WeightSyncError as error:
            self._lose(error.what)

    def _lose(self, reason: str) -> None:
        with self._changed:
            self._reason = self._reason or reason
            self._changed.notify_all()
        self._channel.close()

    def will(self, key: str, value: Any) -> None:
        """Have the trainer set a value, if the key has none, when it loses this process; a later will replaces it."""
        self._do(_Request(do="will", key=key, value=msgspec.Raw(_encoded(value))))

    def find(self, key: str, within: Deadline | None = None) -> Any:
        within = within or Deadline(0.0)
        waits = not within.over
        with self._changed:
            self._number = number = self._number + 1
            answers = self._answers[number] = []
        try:
            self._do(_Request(do="find", key=key, number=number, wait=waits))
            patience = Deadline(self.patience_s, stop=within.stop if waits else None)
            with self._changed:  # the first answer comes at once, and a value later
                while not self._reason and not (patience if not answers else within).over:
                    if answers and answers[-1]:
                        break
                    self._changed.wait(_SLICE_S)
            if not answers and not patience.stop.is_set():
                self._lose(f"{self._channel.peer} hangs: it said nothing in {self.patience_s:g} s")
            if answers and answers[-1]:
                return _decoded(answers[-1])
            if self._reason:
                raise self._ended()
            if waits:
                self._do(_Request(do="leave", key=key, number=number))
        finally:
            with self._changed:
                del self._answers[number]
        return None

    def close(self, reason: str = "") -> None:
        if self._owner != os.getpid():
            return
        if reason and not self._reason:
            with suppress(WeightSyncError):  # the trainer is gone, which ends the store as well
                self.set(LOST, reason, keep=True)
        self._lose(reason or "this worker left")

    def _do(self, request: _Request) -> None:
        try:
            self._channel.send(request, Deadline(self.patience_s))
        except WeightSyncError as error:
            self._lose(error.what)
            raise self._ended() from error


def _encoded(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # a lone surrogate, as the name of a file may have it
        return json.dumps(value, ensure_ascii=False).encode(errors="replace")


def _decoded(value: msgspec.Raw) -> Any:
    """Return the value of a key; None, which no reader takes, for text that is no JSON."""
    try:
        return msgspec.json.decode(value)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _proof(secret: str, end: str, nonces: str) -> str:
    """Return the proof of one end, for which one has to know the secret."""
    return hmac.digest(secret.encode(), (end + nonces).encode(errors="backslashreplace"), "sha256").hex()


def _same(given: Any, proof: str) -> bool:
    return hmac.compare_digest(str(given).encode(errors="backslashreplace"), proof.encode())


def serve(listener: socket.socket, met: Callable[[socket.socket, Any], None], name: str) -> Callable[[], None]:
    """Call ``met`` with each connection and its address, in a thread ``name``.

    Returns:
        A call that closes ``listener``, whose address is free then.
    """
    ended, waiting = threading.Event(), select.poll()

    def accept() -> None:
        while not ended.is_set():
            waiting.poll(1000)
            try:
                with _forking:
                    connected, address = listener.accept()
                    close_in_children(connected)
            except OSError:  # it was closed, its caller has left, or there is no room for another file
                ended.wait(_SLICE_S)
                continue
            threading.Thread(target=met, args=(connected, address), name=name, daemon=True).start()

    def stop() -> None:
        ended.set()
        with suppress(OSError):  # it was closed
            listener.shutdown(socket.SHUT_RDWR)  # frees the port, and lets go of the thread that accepts
        listener.close()

    listener.setblocking(False)  # `accept` holds a lock
    waiting.register(listener, select.POLLIN)
    threading.Thread(target=accept, name=name, daemon=True).start()
    return stop


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
        return bound(str(numeric), port, socket.AF_INET if numeric.version == 4 else socket.AF_INET6)
    except ValueError:
        pass  # a name
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise
    return bound("", port)


def bound(host: str, port: int, family: int = socket.AF_INET) -> socket.socket:
    """Return a socket that listens at exactly this address, and is closed in forked children."""
    with _forking:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        close_in_children(listener)
    return listener


def dial(address: str, port: int, within: Deadline, failure: str = "no attempt was made") -> socket.socket:
    """Return a connection to the process that listens at this address and port, as soon as one does.

    Args:
        address, port: of the trainer.
        within: deadline.
        failure: why the attempt before failed, for the error.

    Raises:
        DeadlineError: nobody does in time.
        TransportError: another thread ended the wait.
    """
    for left_s in within.pauses(shortest_s=_PAUSE_S, longest_s=_SLICE_S):
        try:
            made = in_time(partial(connected_to, address, port, max(0.1, left_s)), within)
        except OSError as error:  # nobody listens; or the name is not known, and that of a service may be, soon
            failure = str(error)
        else:
            if made:
                return made[0]
    raise within.error(
        f"no trainer (rank 0) listened at {address}:{port} ({failure})",
        expected="the trainer calls init_all_workers_group (or open) at the same time",
        state="no group was joined",
        hint="check master_address and master_port; for transport 'ipc', that both ends run on one machine",
    )


def connected_to(address: str, port: int, timeout_s: float) -> socket.socket:
    """Return a connection to who listens there now, as `socket.create_connection`; it is closed in forked children."""
    failure: OSError = OSError(errno.EADDRNOTAVAIL, f"{address} has no address")
    for family, kind, protocol, _, where in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
        with _forking:
            connected = socket.socket(family, kind, protocol)
            close_in_children(connected)
        try:
            connected.settimeout(timeout_s)
            connected.connect(where)
        except OSError as error:
            failure = error
            connected.close()
        else:
            return connected
    raise failure


def close_in_children(resource: Any) -> None:
    """Close ``resource`` in every forked child, which else would keep it open after this process has died."""
    with _forking:
        _OURS.add(resource)


def _close_all() -> None:
    _forking.release()
    for resource in list(_OURS):
        resource.close()


_OURS: weakref.WeakSet[Any] = weakref.WeakSet()
_forking = threading.RLock()
"""Held while a descriptor is made and listed: a child forked in between would keep it open."""

os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_close_all)
