"""The messages between a trainer and its workers, and the handles of the memory that they share.

Each is a JSON object; its field ``kind`` says which one.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import IntegrityError
from torchrl_ext.transports.links import Link
from torchrl_ext.types import Info

__all__ = [
    "Announce", "CudaHandle", "Filled", "FromTrainer", "FromWorker", "Handle", "Hello", "HostHandle", "IPCLoad",
    "Invitation", "Leaving", "Refused", "Stopped", "Taken", "TurnedAway", "Welcome", "decode", "read", "send",
]  # fmt: skip

Natural = Annotated[int, Meta(ge=0)]
Size = Annotated[int, Meta(gt=0)]
Decoded = TypeVar("Decoded")


class _Message(Struct, frozen=True, tag_field="kind", tag=str.lower):
    pass


class HostHandle(_Message, frozen=True, kw_only=True, tag="host"):
    """Memory of a process: its descriptor ``fd``, and the device and inode number of the file behind it."""

    pid: Natural
    fd: Natural
    inode: tuple[int, int]
    bytes: Size


class CudaHandle(_Message, frozen=True, kw_only=True, tag="cuda"):
    """Memory of a GPU, named by its UUID: the driver's handle in hex, and the key by which its own process finds it."""

    device: str
    key: str
    handle: str
    bytes: Size


Handle = HostHandle | CudaHandle


class Hello(_Message, frozen=True, kw_only=True):
    """A worker connects, and lists the devices from which it can take weights, best first."""

    rank: Natural | None
    devices: list[str]


class Leaving(_Message, frozen=True, kw_only=True):
    """The worker cannot use the trainer's memory, and disconnects."""

    why: str


class Taken(_Message, frozen=True, kw_only=True):
    """The worker has copied the bucket; the trainer may fill that half again."""

    handoff: int
    bucket: int


class Refused(_Message, frozen=True, kw_only=True):
    """The worker copies no more buckets of this handoff."""

    handoff: int
    why: str


FromWorker = Hello | Leaving | Taken | Refused


class Welcome(_Message, frozen=True, kw_only=True):
    """The trainer lets a worker in, and gives it the handle of the staging buffer on the best device of both."""

    session: str
    segment: Handle


class TurnedAway(_Message, frozen=True, kw_only=True):
    """The trainer cannot let this worker in."""

    why: str


class Announce(_Message, frozen=True, kw_only=True):
    """A handoff comes; without a control layer, workers hear of it by this."""

    info: Info


class Filled(_Message, frozen=True, kw_only=True):
    """The bucket is in half ``bucket % 2`` of the staging buffer."""

    handoff: int
    bucket: int


class Stopped(_Message, frozen=True, kw_only=True):
    """The trainer fills no more buckets of this handoff."""

    handoff: int
    why: str


FromTrainer = Welcome | TurnedAway | Announce | Filled | Stopped


class Invitation(Struct, frozen=True, kw_only=True):
    """The trainer's address, as `Transport.open` gives it to a control layer, which adds the worker's rank."""

    address: Any
    session: str
    rank: Natural


class IPCLoad(Struct, frozen=True, kw_only=True):
    """One handoff: its number, the version that it brings, and `ParamMeta.to_json` of each parameter."""

    version: Natural
    session: str
    handoff: Natural
    params: list[Any]


def decode(message: Any, kind: type[Decoded] | Any, who: str) -> Any:
    """Return a JSON object as a ``kind``, a struct or a union of structs.

    Raises:
        IntegrityError: it is none.
    """
    try:
        return msgspec.convert(message, type=kind, strict=True)
    except msgspec.ValidationError as error:
        raise IntegrityError(
            f"{who} does not speak this protocol: {error}",
            expected="a process of the same version of torchrl_ext",
            state="nothing was read",
        ) from error


def read(link: Link, kind: Any, within: Deadline) -> Any:
    """Return the next message, one of the union ``kind``; None where none came within the deadline.

    Raises:
        NotConnectedError, TransportError: as `Link.read`.
        IntegrityError: it is another one.
    """
    message = link.read(within.until, within.stop)
    return None if message is None else decode(message, kind, link.peer)


def send(link: Link, message: Struct, within: Deadline) -> None:
    """Send a message; raise as `Link.send`."""
    link.send(msgspec.to_builtins(message), within.until)
