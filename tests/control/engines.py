"""Engines that tests drive through anything, and trainers that drive them step by step, whatever the make."""

from contextlib import ExitStack, contextmanager, suppress
from functools import cache as cached

import httpx
import torch

import torchrl_ext as tx
from tests.control.sockets import serving
from tests.fakes import MAKES, Call, FakeEngine, Faults
from tests.processes import WAIT_S
from tests.turns import CLOSE, PROMPTS, gap
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import DeadlineError, EngineError, EngineRefusedError, EngineUnreachableError
from torchrl_ext.base.messages import Load
from torchrl_ext.data.transports.base import Update
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.data.weights.digests import digest_of, position_digest
from torchrl_ext.sync.receiver import WeightReceiver

PORTS = (*MAKES, "module")
SHAPES = {"a": (4,), "b": (2, 3)}
KEPT = ("content-type", "authorization")
QUICK = {"timeout_s": 5.0, "load_timeout_s": 5.0}


def weights(value):
    """Tensors that are full of a number."""
    return {name: torch.full(shape, float(value)) for name, shape in SHAPES.items()}


class FakeModule(Faults, WeightReceiver):
    """A module of this process, with the attributes of a `FakeEngine`: what would be a request is a message here."""

    kind, url, stock, answers = "inprocess", "inprocess", False, {}

    def __init__(self):
        self.tensors = weights(0)
        Faults.__init__(self)
        WeightReceiver.__init__(self, self.tensors)
        self.versions, self.calls, self.wrongs = dict.fromkeys(SHAPES, 0), [], []
        self.client = tx.make_engine("inprocess", engine=self)

    serving = property(lambda self: self.client.serving.is_set())

    def handle(self, message):
        self.calls.append(Call(route=message.kind, query={}, body=message.to_json(), headers={}))
        fault, answer = self.carry_out(message.kind, lambda: self._handle(message))
        if fault.how in ("cut", "lose"):
            raise EngineUnreachableError("the connection broke")
        if fault.how == "fail":
            raise EngineRefusedError("it fails here")
        if fault.how == "hang":
            raise DeadlineError("no answer in time")
        return answer

    def _handle(self, message):
        answer = super().handle(message)
        if isinstance(message, Load):
            self.versions = dict.fromkeys(SHAPES, message.version)
        if self.serving and not self.whole:
            self.wrongs.append("it serves a part of an update")
        return answer


class RealEngine(Faults):
    """A real engine behind a proxy where requests go wrong, with the attributes of a `FakeEngine` that states need.

    What it computes is asked past the proxy: log-probabilities tell which of ``models``, by version, it holds.
    """

    stock, limits = False, {"timeout_s": WAIT_S, "load_timeout_s": WAIT_S}

    def __init__(self, kind, url, models):
        super().__init__()
        self.kind, self._direct, self._models = kind, tx.make_engine(kind, url=url, **self.limits), models
        self._ends = ExitStack()
        # uvicorn closes a connection behind an answer that an exception carried, when the next call may be on its way
        fresh = httpx.Limits(max_keepalive_connections=0)
        self._forward = self._ends.enter_context(httpx.Client(base_url=url, timeout=WAIT_S, limits=fresh))

    def __enter__(self):
        self.url = self._ends.enter_context(serving(self._forwarded)).url
        return self

    def __exit__(self, *_):
        self._ends.close()

    @property
    def serving(self):
        return not self._direct.paused()

    @property
    def wrongs(self):
        """Also where it says that it is paused it is asked to compute, and must not with a part of a version."""
        paused = self._direct.paused()
        if self._direct.state().asleep:
            return []
        scoring = tx.make_engine(self.kind, url=self._direct.url, load_timeout_s=0.15 if paused else WAIT_S)
        try:
            found = scoring.logprobs(PROMPTS)
        except (EngineError, DeadlineError):
            return [] if paused else ["it serves, and does not compute"]
        finally:
            scoring.close()
        gaps = {version: gap(model, found) for version, model in self._models.items()}
        self.versions = {"weights": min(gaps, key=gaps.get)}
        return [] if min(gaps.values()) < CLOSE else [f"it serves a mixture, {gaps} nats away"]

    def _forwarded(self, asked):
        headers = {name: value for name, value in asked.headers.items() if name.lower() in KEPT}

        def forward():
            with suppress(httpx.HTTPError):
                return self._forward.request(asked.method, asked.url, content=asked.content, headers=headers)

        fault, answer = self.carry_out("", forward)
        if fault.how == "fail":
            return 500, b"it fails here"
        if answer is None or fault.how == "lose":
            raise ConnectionAbortedError
        return (200, b'"junk"') if fault.how == "junk" else (answer.status_code, answer.content)


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
    return tx.make_engine(fake.kind, url=fake.url, **{**getattr(fake, "limits", QUICK), **more, **settings})


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
            own = {"version": version, "params": [meta.to_json() for meta in self._params]}
            self._loads[version] = {**own, "handoff": handoff.info}
            self._digests[version] = {name: position_digest(tensor).hex() for name, tensor in source}

    def digest(self, version):
        """The digest over those of all tensors of a version."""
        return digest_of(self._digests[version])

    def invitation(self):
        self._joined += 1
        return {
            "transport": "disk",
            "offer": self._transport.open(1, self._params, Deadline(10)).info,
            "connection": f"{self.name} {self._joined}",
            "sender": self.name,
            "params": [meta.to_json() for meta in self._params],
            "rank_offset": 1,
            "world_size": 2,
        }

    def steps(self, engine, version):
        """The steps of an update of ``engine`` to a version, in order, by their names."""
        update = cached(lambda: engine.update(version))
        return {
            "connect": lambda: engine.join(self.invitation()),
            "prefetch": lambda: update().stage(),
            "begin": lambda: update().begin(),
            "load": lambda: update().load(self._loads[version]),
            "verify": lambda: update().verify(self._digests[version]) if engine.verifies else None,
            "commit": lambda: update().commit(),
        }

    def update(self, engine, version):
        for step in self.steps(engine, version).values():
            step()
