"""The messages between a trainer and its workers, protocol ``ipc4``. Both ends have to be of one release.

Each is a JSON object; its field ``kind`` says which one.
"""

from __future__ import annotations

from typing import Any

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import IntegrityError
from torchrl_ext.base.types import Count, Params, Wire, decoded
from torchrl_ext.data.group.links import Link
from torchrl_ext.data.ipc.device_memory import DeviceHandle
from torchrl_ext.data.ipc.memory import HostHandle

__all__ = ["Announce", "Done", "Hello", "IPCLoad", "IPCMessage", "IPCOffer", "Welcome", "read", "send"]


class IPCOffer(Wire, frozen=True, kw_only=True):
    """The trainer's address, and the name of its connection; goes to workers by the control layer."""

    address: str
    session: str


class IPCLoad(Wire, frozen=True, kw_only=True):
    """One handoff of a connection, by its number; goes to workers by the control layer, or in `Announce`."""

    session: str
    handoff: Count


class IPCMessage(Wire, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """The base of what both ends say to each other."""


class Hello(IPCMessage, frozen=True, kw_only=True):
    """A worker connects, and lists the devices from which it can take weights, best first."""

    rank: Count | None
    devices: list[str]


class Welcome(IPCMessage, frozen=True, kw_only=True):
    """The trainer lets a worker in, and gives it the handle of the staging buffer on the best device of both."""

    session: str
    segment: HostHandle | DeviceHandle


class Announce(IPCMessage, frozen=True, kw_only=True):
    """A version comes; only where no control layer says so."""

    version: Count
    params: Params
    load: IPCLoad


class Done(IPCMessage, frozen=True, kw_only=True):
    """The trainer has filled a bucket of the handoff, or a worker has copied it, so its half may be filled again."""

    handoff: Count
    bucket: Count


def read(link: Link, within: Deadline) -> Any:
    """Return the next message, or None where none came within the deadline.

    Raises:
        NotConnectedError, TransportError: as `Link.read`.
        IntegrityError: it is none of this protocol.
    """
    message = link.read(within)
    if message is None:
        return None
    try:
        kinds: Any = Hello | Welcome | Announce | Done
        return decoded(message, kinds, f"a message of {link.peer}", IntegrityError)
    except IntegrityError as error:
        hint = "use one release of torchrl_ext on both ends"
        raise IntegrityError(error.what, expected="protocol ipc4", state=error.state, hint=hint) from None


def send(link: Link, message: IPCMessage, within: Deadline) -> None:
    """Send a message; raise as `Link.send`."""
    link.send(message.to_json(), within)
