"""A worker's end of `native`, in an engine that has our plugin in a fleet of which some have not, or without any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

from torch import Tensor

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError, WeightSyncError
from torchrl_ext.messages import Wire
from torchrl_ext.transports.base import Arrival, WorkerEnd
from torchrl_ext.transports.collective.stream import Incoming
from torchrl_ext.transports.native.meeting import Meeting
from torchrl_ext.transports.native.wire import Make, layout_of
from torchrl_ext.transports.standalone import Mailbox

__all__ = ["Load", "NativeWorker"]


class Load(Wire, frozen=True):
    """How the parameters of a version travel (`torchrl_ext.transports.native.wire.Layout`)."""

    make: Make
    bucket_bytes: int
    calls: list[list[int]]


@final
class NativeWorker(WorkerEnd, Mailbox):
    """Receives the broadcasts of a group that was formed.

    Args:
        meeting: the group.
        timeout_s: deadline of dropping a version that cannot land, in seconds.
    """

    def __init__(self, meeting: Meeting, timeout_s: float) -> None:
        self._meeting, self._timeout_s = meeting, timeout_s

    def receive(self, arrival: Arrival, into: Mapping[str, Tensor], within: Deadline) -> Iterator[tuple[str, Tensor]]:
        pairs = self._receiving(arrival, into, within)
        next(pairs)  # from here on the version is taken or drained, also by a loader that asks for nothing
        return pairs

    def _receiving(self, arrival: Arrival, into: Mapping[str, Tensor], within: Deadline) -> Iterator[Any]:
        """Yield None once the version has begun, and then its pairs."""
        incoming, whole = self._incoming(arrival, into, within), False
        try:
            yield None
            yield from incoming.pairs()
            whole = True
        except WeightSyncError as error:
            self.close()
            raise type(error)(
                f"version {arrival.version} did not arrive: {error.what}",
                state="a part of it may be in the model",
                hint="connect again, and send the next version",
            ) from error
        finally:
            if not whole and self._meeting.connected:
                self._drain(incoming)

    def _incoming(self, arrival: Arrival, into: Mapping[str, Tensor], within: Deadline) -> Incoming:
        load, meeting = Load.from_json(arrival.info, "the handoff of a native transport"), self._meeting
        if load.make != meeting.make:
            raise ConfigError(f"the trainer speaks to {load.make}, and this end joined a group for {meeting.make}")
        buckets = layout_of(arrival.params, load.make, load.bucket_bytes).buckets
        how: dict[str, Any] = {"bucket_bytes": load.bucket_bytes, "slice_bytes": None}
        return Incoming(meeting.broadcasts(within), buckets, arrival.params, into, **how)

    def _drain(self, incoming: Incoming) -> None:
        """Receive and drop the rest of a version, so that the group stays in step."""
        try:
            incoming.drain()
        except WeightSyncError:
            self.close()

    def get(self, within: Deadline, received: Arrival | None = None) -> Arrival | None:
        return self._meeting.get(within)

    def refuse(self, arrival: Arrival, error: BaseException) -> None:
        self._drain(self._incoming(arrival, {}, Deadline(self._timeout_s, "the trainer")))

    def check_connection(self) -> bool:
        return self._meeting.connected

    def close(self) -> None:
        self._meeting.close()
