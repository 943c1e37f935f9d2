"""The messages between a trainer and its workers, and the handles of the memory that they share.

Each is a JSON object; its field ``kind`` says which one.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import IntegrityError
from torchrl_ext.messages import Params, Wire
from torchrl_ext.transports.links import Link
from torchrl_ext.types import Count, Info, decoded

__all__ = [
    "Announce", "CudaHandle", "Filled", "FromTrainer", "FromWorker", "Handle", "Hello", "HostHandle", "Leaving", "Load",
    "Offer", "Refused", "Stopped", "Taken", "TurnedAway", "Welcome", "read", "send",
]  # fmt: skip

Size = Annotated[int, Meta(gt=0)]


class Offer(Wire, frozen=True, kw_only=True):
    """The trainer's address, and the name of its connection; goes to workers by the control layer."""

    address: str
    session: str


class Load(Wire, frozen=True, kw_only=True):
    """One handoff of a connection, by its number; goes to workers by the control layer, or in `Announce`."""

    session: str
    handoff: Count


class _Tagged(Wire, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    pass


class HostHandle(_Tagged, frozen=True, kw_only=True, tag="host"):
    """Memory of a process: its descriptor ``fd``, and the device and inode number of the file behind it."""

    pid: Count
    fd: Count
    inode: tuple[int, int]
    bytes: Size


class CudaHandle(_Tagged, frozen=True, kw_only=True, tag="cuda"):
    """Memory of a GPU, named by its UUID: the driver's handle in hex, and the key by which its own process finds it."""

    device: str
    key: str
    handle: str
    bytes: Size


Handle = HostHandle | CudaHandle


class Hello(_Tagged, frozen=True, kw_only=True):
    """A worker connects, and lists the devices from which it can take weights, best first."""

    rank: Count | None
    devices: list[str]


class Leaving(_Tagged, frozen=True, kw_only=True):
    """The worker cannot use the trainer's memory, and disconnects."""

    why: str


class Taken(_Tagged, frozen=True, kw_only=True):
    """The worker has copied the bucket; the trainer may fill that half again."""

    handoff: int
    bucket: int


class Refused(_Tagged, frozen=True, kw_only=True):
    """The worker copies no more buckets of this handoff."""

    handoff: int
    why: str


FromWorker = Hello | Leaving | Taken | Refused


class Welcome(_Tagged, frozen=True, kw_only=True):
    """The trainer lets a worker in, and gives it the handle of the staging buffer on the best device of both."""

    session: str
    segment: Handle


class TurnedAway(_Tagged, frozen=True, kw_only=True):
    """The trainer cannot let this worker in."""

    why: str


class Announce(_Tagged, frozen=True, kw_only=True):
    """A version comes; only where no control layer says so."""

    version: Count
    params: Params
    load: Load


class Filled(_Tagged, frozen=True, kw_only=True):
    """The bucket is in half ``bucket % 2`` of the staging buffer."""

    handoff: int
    bucket: int


class Stopped(_Tagged, frozen=True, kw_only=True):
    """The trainer fills no more buckets of this handoff."""

    handoff: int
    why: str


FromTrainer = Welcome | TurnedAway | Announce | Filled | Stopped


def read(link: Link, kind: Any, within: Deadline) -> Any:
    """Return the next message, one of the union ``kind``; None where none came within the deadline.

    Raises:
        NotConnectedError, TransportError: as `Link.read`.
        IntegrityError: it is another one.
    """
    message: Info | None = link.read(within.until, within.stop)
    return None if message is None else decoded(message, kind, f"a message of {link.peer}", IntegrityError)


def send(link: Link, message: _Tagged, within: Deadline) -> None:
    """Send a message; raise as `Link.send`."""
    link.send(message.to_json(), within.until)
