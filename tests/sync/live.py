"""Engines of this process that take versions while they serve, a fleet of them, and faults at any call."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from itertools import count

import torch

import torchrl_ext as tx
from torchrl_ext.base.errors import EngineRefusedError, EngineUnreachableError, WeightSyncError
from torchrl_ext.base.messages import Commit, Inspect, State, Undo
from torchrl_ext.control.engine import Engine
from torchrl_ext.control.fleet import Fleet
from torchrl_ext.data.deltas.torch_ops import kernels_on
from torchrl_ext.sync.local.module import ModulePort
from torchrl_ext.sync.receiver import WeightReceiver

SIZES = {"a": 64, "b": 8}
FAULTS = ("refuse", "refuse for good", "lose", "lose for good", "die before", "die after", "damage", "trainer")
"""What goes wrong at a call: it is refused; its answer is lost; the engine ends and is started anew; what is written is
something else; the trainer ends."""


class TrainerEnds(BaseException):
    """Ends a trainer in the midst of a call."""


class _Damaging:
    """Loops that write something else once."""

    def __init__(self, own):
        self._own, self.on_host, self.land, self.words = own, own.on_host, own.land, own.words
        self.left = 1

    def exchange(self, writes):
        if self.left:
            self.left -= 1
            found = self._own.exchange(writes)
            writes.targets[0][writes.offsets[0]] ^= 1
            found[0] += 1  # as it would be read back
            writes.targets[0][writes.offsets[0]] ^= 1
            return found
        return self._own.exchange(writes)


class LivePort(ModulePort):
    """A module that generates all the time: a commit that fails is taken back by the engine, or it halts."""

    live = True

    def __init__(self, engine):
        super().__init__(engine.receiver)
        self.engine, self.url = engine, engine.url
        self.handle = engine.handle

    def describe(self):
        self.engine.arrives("describe")
        return super().describe()

    def paused(self):
        self.engine.arrives("paused")
        return super().paused()

    def pause(self):
        self.engine.arrives("pause")
        super().pause()

    def resume(self):
        self.engine.arrives("resume")
        super().resume()


class LiveEngine:
    """One engine of a fleet, with its own address, that a test starts, ends and breaks.

    Attributes:
        calls: what it was asked, as names of messages and of calls.
        fault: what goes wrong, and at the how manieth call from now on; None for nothing.
    """

    def __init__(self, name):
        self.url, self.calls, self.fault, self.dead = f"live-{name}", [], None, False
        self.busy = threading.Lock()  # a trainer that ended may have left calls behind
        self.start()
        self.client = Engine(lambda: self.port, kind="inprocess", url=self.url)

    def start(self):
        """Start anew at the first weights."""
        self.held = {name: torch.zeros(size) for name, size in SIZES.items()}
        self.receiver, self.dead, self.silent = WeightReceiver(self.held), False, False
        self.port = LivePort(self)

    @property
    def serving(self):
        return not self.dead and self.port.serving.is_set()

    def arrives(self, name):
        """Note a call; raise where it does not come to the engine."""
        if self.dead or self.silent:
            raise EngineUnreachableError(f"{self.url} does not answer")
        self.calls.append(name)
        how, at = self.fault or ("", None)
        if at is None:
            return ""
        self.fault = (how, at - 1)
        if at != 0 and not (at < 0 and how == "refuse for good"):
            return ""
        if how == "die before":
            self.dead = True
            raise EngineUnreachableError(f"{self.url} died")
        if how in ("refuse", "refuse for good"):
            raise EngineRefusedError(f"{self.url} fails at {name}")
        if how == "trainer":
            raise TrainerEnds
        return how

    def handle(self, message):
        how = self.arrives(message.kind)
        if how == "damage" and isinstance(message, Commit):
            patcher = self.receiver._loader._patcher
            patcher._kernels = _Damaging(kernels_on(torch.device("cpu")))
        with self.busy:
            answer = self._carried_out(message)
        if how == "die after":
            self.dead = True
        if how == "lose for good":
            self.silent = True
        if how in ("die after", "lose", "lose for good"):
            raise EngineUnreachableError(f"the answer of {self.url} was lost")
        return answer

    def _carried_out(self, message):
        if not isinstance(message, (Commit, Undo)):
            return self.receiver.handle(message)
        if isinstance(message, Commit) and not self.serving:
            raise EngineRefusedError("the engine is paused")
        try:
            return self.receiver.handle(message)
        except WeightSyncError:
            if not self.receiver.whole:
                with suppress(WeightSyncError):
                    self.receiver.handle(Undo(version=message.version))
            if not self.receiver.whole:
                self.port.serving.clear()
            raise


class LiveFleet:
    """A trainer with a policy of two tensors, and engines that follow it by deltas.

    Attributes:
        sent: the policy as it was when each version was attempted, by version.
    """

    def __init__(self, root, engines, **settings):
        self.engines = [LiveEngine(number) for number in range(engines)]
        self.policy = {name: torch.zeros(size) for name, size in SIZES.items()}
        self.sent, self._root, self._settings, self._steps = {0: self._copy()}, root, settings, count(1)
        self.begin()

    def _copy(self):
        return {name: tensor.clone() for name, tensor in self.policy.items()}

    def begin(self):
        """Start a trainer."""
        self.transport = tx.make_transport("delta", root=self._root)
        preparing = self.transport.prepare

        def prepared(update, within):
            self.sent[update.version] = self._copy()
            return preparing(update, within)

        vars(self.transport)["prepare"] = prepared
        clients = [engine.client for engine in self.engines]
        fleet = Fleet(clients) if len(clients) > 1 else clients[0]
        self.sender = tx.WeightSender(self.transport, fleet, **self._settings)
        self.sender.register_model(self.policy)

    def end(self):
        """End the trainer as a kill does: no engine hears of it."""
        self.transport.shutdown()

    def update(self):
        """Change some of the policy, and send it."""
        step = next(self._steps)
        self.policy["a"][step % 64 :: 16] += 1
        self.policy["b"][step % 8] -= 1
        return self.sender.update_weights()

    def held(self, engine):
        """The versions whose bytes an engine holds, of all that were ever attempted."""
        return {
            version
            for version, sent in self.sent.items()
            if all(torch.equal(engine.held[name], tensor) for name, tensor in sent.items())
        }

    def check(self, *, one_version=False, unsure=()):
        """Assert that each engine that serves holds exactly one version, which it names.

        Args:
            one_version: all that serve serve the same.
            unsure: engines that gave no answer, which may differ.
        """
        served = Counter()
        for engine in self.engines:
            with engine.busy:
                if not engine.serving:
                    continue
                assert engine.receiver.whole, f"{engine.url} serves a part of a version"
                assert engine.receiver.version in self.held(engine), f"{engine.url} serves other bytes than it says"
                if engine.url not in unsure:
                    served[engine.receiver.version] += 1
        assert not one_version or len(served) < 2, served

    def mend(self):
        """Start what died anew, and let what was silent answer."""
        for engine in self.engines:
            engine.fault, engine.silent = None, False
            if engine.dead:
                engine.start()


QUESTIONS = {State().kind, Inspect().kind, "describe", "paused"}
"""Calls that change nothing."""
