"""Stand-ins for nccl4py and for torch.cuda, over threads of this process and memory of the host.

They keep NCCL's promises and no others: a communicator that does not block, calls that are posted some time after they
return, a first transfer of two ranks that is posted once both are there, streams on threads of their own, kernels that
spin until an abort, after which all looks as if it had landed.
"""

import itertools
import queue
import sys
import threading
import weakref
from collections import defaultdict, deque
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

from tests.data.group.members import WAIT_S
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.data.group import nccl

SUCCESS, REMOTE_ERROR, IN_PROGRESS = 0, 6, 7
WORDS = {REMOTE_ERROR: "remote process exited or there was a network error"}
STREAMS = []
"""By their handles."""
_TURN_S = 0.02


class NCCLError(Exception):
    """Of the bindings, no RuntimeError."""


class Event(threading.Event):
    query = threading.Event.is_set


class Stream:
    """Runs what is queued on it in order, in a thread."""

    def __init__(self, device=None):
        queued = queue.SimpleQueue()
        self.cuda_stream, self.waited, self.put, self._next = len(STREAMS), [], queued.put, queued.get
        STREAMS.append(self)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            self._next()()

    def record_event(self):
        event = Event()
        self.put(event.set)
        return event

    def wait_event(self, event):
        self.waited.append(event)
        self.put(event.wait)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def query(self):
        return self.record_event().wait(_TURN_S)


class Cuda(threading.local):
    """What is used of torch.cuda; each thread has a current stream of its own."""

    Stream = Stream

    def __init__(self):
        self._own = Stream()

    def current_stream(self, device=None):
        return self._own

    def device(self, device):
        return nullcontext()


class Fabric:
    """What the communicators of one test share.

    Attributes:
        reports: whether a lost peer is reported, as over sockets; over NVLink nobody hears of it.
        seen: what each communicator was asked, by rank.
    """

    def __init__(self):
        self.changed, self.reports = threading.Condition(), True
        self.members, self.boxes, self.asked = defaultdict(dict), defaultdict(deque), set()
        self.seen = defaultdict(list)

    def until(self, over):
        """Wait for what another thread does."""
        assert any(over() for _ in Deadline(WAIT_S).pauses(longest_s=_TURN_S))


class UniqueId(bytes):
    made = itertools.count(1)

    @classmethod
    def from_bytes(cls, content):
        if len(content) != 128:
            raise ValueError("buffer length must be 128 bytes")
        return cls(content)


def core(fabric):
    """The module ``nccl.core`` over a fabric."""
    local = threading.local()

    class Communicator:
        """One rank's end, whose calls stand in a group."""

        def __init__(self):
            self.key, self.aborted, self.failed, self.awaits = b"", False, SUCCESS, []

        def initialize(self, nranks, rank, unique_id, config):
            assert config.blocking is False
            self.key, self.size, self.rank = bytes(unique_id), nranks, rank
            with fabric.changed:
                fabric.members[self.key][rank] = self
                fabric.changed.notify_all()

        def get_async_error(self):
            if not self.key or self.aborted:
                raise NCCLError("Cannot get async error: Communicator not initialized")
            if self.failed:
                return self.failed
            joined = len(fabric.members[self.key]) == self.size
            return SUCCESS if joined and all(pair in fabric.asked for pair in self.awaits) else IN_PROGRESS

        def get_last_error(self):
            return "socket closed" if self.failed else ""

        def abort(self):
            fabric.seen[getattr(self, "rank", None)].append("abort")
            with fabric.changed:
                self.aborted = True
                fabric.changed.notify_all()
            if fabric.reports:
                for other in fabric.members[self.key].values():
                    other.failed = other.failed or REMOTE_ERROR * (other is not self)

        def send(self, flat, peer, *, stream):
            local.calls.append((self, "send", flat, peer, stream))

        def recv(self, flat, peer, *, stream):
            local.calls.append((self, "recv", flat, peer, stream))

        def broadcast(self, sent, flat, root, *, stream):
            assert sent is flat and root == 0
            local.calls.append((self, "broadcast", flat, None, stream))

        def allreduce(self, sent, flat, op, *, stream):
            assert sent is flat and op == "sum"
            local.calls.append((self, "sum", flat, None, stream))

        # on a stream

        def run(self, calls):
            sent = []
            for kind, flat, peer in calls:
                others = [rank for rank in range(self.size) if rank != self.rank]
                targets = {"send": [peer], "broadcast": others * (self.rank == 0), "sum": others}.get(kind, [])
                sent += [self._put("pair" if kind == "send" else "all", to, flat().clone()) for to in targets]
            for kind, flat, peer in calls:
                if kind == "recv":
                    self._take("pair", peer, lambda came, own=flat: own().copy_(came))
                elif kind == "broadcast" and self.rank:
                    self._take("all", 0, lambda came, own=flat: own().copy_(came))
                elif kind == "sum":
                    for other in range(self.size):
                        if other != self.rank:
                            self._take("all", other, lambda came, own=flat: own().add_(came))
            self._spin(lambda: all(one.taken for one in sent))

        def _put(self, kind, to, flat):
            parcel = SimpleNamespace(flat=flat, taken=False)
            with fabric.changed:
                fabric.boxes[self.key, kind, self.rank, to].append(parcel)
                fabric.changed.notify_all()
            return parcel

        def _take(self, kind, source, land):
            box = fabric.boxes[self.key, kind, source, self.rank]
            if self._spin(lambda: box):
                with fabric.changed:
                    parcel = box.popleft()
                    land(parcel.flat)
                    parcel.taken = True
                    fabric.changed.notify_all()

        def _spin(self, over):
            with fabric.changed:
                while not over() and not self.aborted:
                    fabric.changed.wait(_TURN_S)
                return not self.aborted

    @contextmanager
    def group():
        local.calls = []
        yield
        calls, local.calls = local.calls, None
        own, stream = calls[0][0], STREAMS[calls[0][-1]]
        if (state := own.get_async_error()) != SUCCESS:
            raise NCCLError(WORDS.get(state, "invalid usage: the last call was not posted"))
        fabric.seen[own.rank].append([(kind, peer) for _, kind, _, peer, _ in calls])
        pairs = [(own.key, own.rank, peer) for _, _, _, peer, _ in calls if peer is not None]
        with fabric.changed:
            fabric.asked.update(pairs)
        own.awaits = [(key, peer, rank) for key, rank, peer in pairs]
        # NCCL has addresses, and keeps nobody's memory
        kept = [(kind, weakref.ref(flat), peer) for _, kind, flat, peer, _ in calls]
        stream.put(lambda: own.run(kept))

    library = SimpleNamespace(version=SimpleNamespace(release=(2, 28, 9)))
    return SimpleNamespace(
        Communicator=Communicator,
        UniqueId=UniqueId,
        NCCLConfig=lambda blocking: SimpleNamespace(blocking=blocking),
        SUM="sum",
        get_unique_id=lambda: UniqueId(next(UniqueId.made).to_bytes(128, "big")),
        get_error_string=WORDS.get,
        get_version=lambda: SimpleNamespace(libnccl=library),
        group=group,
    )


def install(monkeypatch):
    """Put both stand-ins where the carrier looks for them, and return the fabric."""
    fabric = Fabric()
    monkeypatch.setitem(sys.modules, "nccl", SimpleNamespace(core=core(fabric)))
    monkeypatch.setattr(nccl, "cuda", Cuda())
    return fabric
