"""Engines that tests drive through anything, and trainers that drive them step by step, whatever the make."""

from contextlib import contextmanager

import torch

import torchrl_ext as tx
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import DeadlineError, EngineRefusedError, EngineUnreachableError
from torchrl_ext.messages import Load, State
from torchrl_ext.sync.receiver import WeightReceiver
from torchrl_ext.testing import MAKES, Call, FakeEngine, Fault
from torchrl_ext.transports.base import Update
from torchrl_ext.weights.digests import tensor_digest
from torchrl_ext.weights.source import as_source

PORTS = (*MAKES, "module")
SHAPES = {"a": (4,), "b": (2, 3)}
QUICK = {"timeout_s": 5.0, "load_timeout_s": 5.0}


def weights(value):
    """Tensors that are full of a number."""
    return {name: torch.full(shape, float(value)) for name, shape in SHAPES.items()}


class FakeModule(WeightReceiver):
    """A module of this process, with the attributes of a `FakeEngine`: what would be a request is a message here."""

    kind, url, stock, answers = "inprocess", "inprocess", False, {}

    def __init__(self):
        self.tensors = weights(0)
        super().__init__(self.tensors)
        self.versions, self.calls, self.wrongs, self._faults = dict.fromkeys(SHAPES, 0), [], [], []
        self.client = tx.make_engine("inprocess", engine=self)
        self._host = super().handle

    serving = property(lambda self: self.client.serving.is_set())

    def inject(self, how="fail", route="", **more):
        fault = Fault(how=how, route=route, **more)
        self._faults.append([fault, fault.after])

    def heal(self):
        self._faults.clear()

    def handle(self, message):
        self.calls.append(Call(route=message.kind, query={}, body=message.to_json(), headers={}))
        fault = Fault(how="pass")
        for row in list(self._faults):
            row[1] -= row[0].route in ("", message.kind)
            if row[1] < 0:
                self._faults.remove(row)
                fault = row[0]
        if fault.first is not None:
            fault.first()
        if fault.how == "cut":
            raise EngineUnreachableError("the connection broke")
        if fault.how == "fail":
            raise EngineRefusedError("it fails here")
        for _ in range(2 if fault.how == "twice" else 1):
            told = super().handle(message)
            if isinstance(message, Load):
                self.versions = dict.fromkeys(SHAPES, message.version)
            if self.serving and not self.whole:
                self.wrongs.append("it serves a part of an update")
        if fault.how == "lose":
            raise EngineUnreachableError("the connection broke")
        if fault.how == "hang":
            raise DeadlineError("no answer in time")
        return told


class RealEngine:
    """The embedded engine, served in this process, with the attributes of a `FakeEngine` that tests of states need.

    ``sources`` are the weights of each version. A fault befalls a message that some step sends it, not a request.
    """

    kind, stock = "embedded", False

    def __init__(self, engine, url, sources):
        self.url, self._engine, self._sources, self._faults, self._handle = url, engine, sources, [], engine.handle
        engine.handle = self._handled

    serving = property(lambda self: not self._engine.scheduler.paused and not self._engine.asleep)

    @property
    def wrongs(self):
        state = self._handle(State())
        return [f"it serves {state}"] if self.serving and (not state["whole"] or state.get("empty")) else []

    @property
    def versions(self):
        held, found = self._engine.digests(), None
        for version, source in self._sources.items():
            if all(held.get(name) == tensor_digest(tensor) for name, tensor in source):
                found = version
        return {"weights": found}

    def inject(self, how="fail", *, after=0):
        self._faults.append([how, after])

    def heal(self):
        self._faults.clear()

    def _handled(self, message):
        how = "pass"
        for row in list(self._faults):
            row[1] -= 1
            if row[1] < 0:
                self._faults.remove(row)
                how = row[0]
        if how in ("fail", "cut"):
            raise EngineRefusedError("it fails here")
        for _ in range(2 if how == "twice" else 1):
            told = self._handle(message)
        if how in ("lose", "junk"):
            raise DeadlineError("the answer is lost")
        return told


@contextmanager
def running(port):
    """A `FakeEngine` or a `FakeModule` with the tensors of `weights`."""
    if port == "module":
        yield FakeModule()
        return
    with FakeEngine(port, weights(0)) as fake:
        yield fake


def client(fake, **settings):
    """A client of it with short deadlines; a module has one."""
    if isinstance(fake, FakeModule):
        return fake.client
    more = {"flush_timeout_s": 5.0} if fake.kind == "sglang" else {}
    return tx.make_engine(fake.kind, url=fake.url, **{**QUICK, **more, **settings})


class Trainer:
    """Publishes versions as files, and takes the steps of an update one by one.

    ``versions`` are the numbers of what it sends; ``made`` gives the weights of each.
    """

    def __init__(self, root, versions, made=weights):
        self._transport, self._loads, self._digests, self.name = (
            tx.DiskTransport(root, keep_files=True),
            {},
            {},
            root.name,
        )
        self._params = as_source(made(versions[0])).params()
        self._joined = 0
        for version in versions:
            source = as_source(made(version))
            handoff = self._transport.prepare(Update(source=source, version=version), Deadline(10))
            own = {"transport": "disk", "version": version, "params": [meta.to_json() for meta in self._params]}
            self._loads[version] = {**own, **handoff.info}
            self._digests[version] = {name: tensor_digest(tensor) for name, tensor in source}

    def invitation(self):
        self._joined += 1
        return {
            **self._transport.open(1, self._params, Deadline(10)).info,
            "transport": "disk",
            "connection": f"{self.name} {self._joined}",
            "sender": self.name,
            "params": [meta.to_json() for meta in self._params],
            "rank_offset": 1,
            "world_size": 2,
        }

    def steps(self, engine, version):
        """The steps of an update of ``engine`` to a version, in order, by their names."""
        found = {
            "connect": lambda: engine.connect(self.invitation()),
            "prefetch": lambda: engine.prefetch(version),
            "begin": lambda: engine.begin(version),
            "load": lambda: engine.load(self._loads[version]),
            "verify": lambda: engine.verify(self._digests[version]) if engine.verifies else None,
            "commit": lambda: engine.commit(version),
        }
        return found

    def update(self, engine, version):
        for step in self.steps(engine, version).values():
            step()
