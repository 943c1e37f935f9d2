"""The life of a transport as a state machine: updates of two senders that fail at any step, engines that start anew.

Whatever happened, an engine that is not paused serves one version as one of the senders made it, and an update that
returns has put the sender's weights there.
"""

from __future__ import annotations

import tempfile
from abc import abstractmethod
from dataclasses import replace
from pathlib import Path

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import torchrl_ext as tx
from torchrl_ext.base.errors import EngineRefusedError, UpdateError
from torchrl_ext.control.engine import Engine
from torchrl_ext.sync.local.module import ModulePort

BEFORE_THE_PAUSE = ("open", "join", "prepare", "prefetch", "ahead")
IN_THE_PAUSE = ("start", "load", "transfer", "verify", "finish")
"""The steps of an update: calls of a transport, and messages to an engine."""
MOMENTS = ("before", "after")


class Fault:
    """Raises once, before or after the step that it is set to; checks that no version number is used twice."""

    def __init__(self):
        self.step = None
        self.moment = "before"
        self.error = RuntimeError
        self._sent = {}

    def arm(self, step, moment="before", error=RuntimeError):
        """Have the next call of ``step`` raise ``error`` before or after its work; None for no step."""
        self.step, self.moment, self.error = step, moment, error

    def around(self, step, call, *given):
        """Make a call, and raise where it is the one."""
        self._at(step, "before")
        result = call(*given)
        self._at(step, "after")
        return result

    def _at(self, step, moment):
        if (step, moment) == (self.step, self.moment):
            self.step = None
            raise self.error(f"the {step} broke")

    def in_transport(self, transport):
        """Return the same transport, whose steps may fail from here on."""
        opening, preparing = transport.open, transport.prepare

        def stepped(name, handoff):
            step = getattr(handoff, name)
            return lambda given: self.around(name, step, given)

        def opened(*given):
            return self.around("open", opening, *given)

        def prepared(update, within):
            content = {name: tensor.clone() for name, tensor in update.source.whole}
            known = self._sent.setdefault(update.version, content)
            assert all(torch.equal(known[name], content[name]) for name in content), f"version {update.version} twice"
            handoff = self.around("prepare", preparing, update, within)
            return replace(handoff, **{name: stepped(name, handoff) for name in ("ahead", "transfer", "served")})

        vars(transport).update(open=opened, prepare=prepared)
        return transport


class _FaultyPort(ModulePort):
    def __init__(self, served, fault):
        super().__init__(served)
        self._fault = fault

    def call(self, message):
        return self._fault.around(message.kind, super().call, message)


class Trained:
    """A policy of two tensors, the sender that sends it by a transport, and the engine that serves it."""

    def __init__(self, transport):
        self.policy = {"a": torch.zeros(64), "b": torch.zeros(8)}
        self.fault, self.parts = Fault(), transport.abilities.parts
        self.start()
        self.sender = tx.WeightSender(self.fault.in_transport(transport), self.engine)
        self.sender.register_model(self.policy)

    def start(self):
        """Start an engine at the first weights."""
        self.served = {name: torch.zeros_like(tensor) for name, tensor in self.policy.items()}
        self.engine = Engine.of(_FaultyPort(self.served, self.fault))

    def update(self, *changed, only=None):
        """Change tensors of the policy, and send all of it, or a part where the transport can."""
        for name in changed:
            self.policy[name] += 1
        return self.sender.update_weights(only=only if self.parts else None)

    def serves(self, weights):
        """Return whether the engine holds these weights, bit for bit."""
        return all(torch.equal(tensor, weights[name]) for name, tensor in self.served.items())

    @property
    def row(self):
        """State and version of the engine, as it says."""
        (row,) = self.engine.look()
        return row.state, row.version


class TransportLife(RuleBasedStateMachine):
    """Updates in any order, whole and in part; a subclass makes the transport."""

    @abstractmethod
    def make_trainer(self, folder):
        """Make a trainer's end for one worker of an engine in this process; ``folder`` is empty and its own."""

    @initialize()
    def begin(self):
        self.folder = tempfile.TemporaryDirectory()
        folder = Path(self.folder.name)
        (folder / "first").mkdir()
        self.trained, self.count = Trained(self.make_trainer(folder / "first")), 0
        self.sound = []
        (folder / "second").mkdir()
        self.other = tx.WeightSender(self.make_trainer(folder / "second"), self.trained.engine)
        self._made(self.trained.served)

    def teardown(self):
        self.trained.sender.shutdown()
        self.other.shutdown()
        self.folder.cleanup()

    def _made(self, weights):
        self.sound.append({name: tensor.clone() for name, tensor in weights.items()})

    def _changed(self, names):
        self.count += 1
        for name in names:
            self.trained.policy[name].fill_(self.count)
        self._made(self.trained.policy)

    @rule(names=st.sets(st.sampled_from("ab"), min_size=1), part=st.booleans())
    def update(self, names, part):
        self._changed(names)
        report = self.trained.update(only=sorted(names) if part else None)
        assert report.verified and self.trained.serves(self.trained.policy)
        assert self.trained.row == ("serving", report.version)

    @rule(
        names=st.sets(st.sampled_from("ab"), min_size=1),
        part=st.booleans(),
        step=st.sampled_from([*BEFORE_THE_PAUSE, *IN_THE_PAUSE, "served"]),
        moment=st.sampled_from(MOMENTS),
        error=st.sampled_from([RuntimeError, KeyboardInterrupt]),
    )
    def update_fails(self, names, part, step, moment, error):
        self._changed(names)
        self.trained.fault.arm(step, moment, error)
        try:
            report = self.trained.update(only=sorted(names) if part else None)
        except (UpdateError, KeyboardInterrupt):
            assert self.trained.fault.step is None, "nothing but this fails"
        else:
            assert report.verified and self.trained.serves(self.trained.policy)  # a step that was not needed
        self.trained.fault.arm(None)

    @rule()
    def another_sender_updates(self):
        self.count += 1
        weights = {name: torch.full_like(tensor, -self.count) for name, tensor in self.trained.policy.items()}
        self._made(weights)
        assert self.other.update_weights(weights).verified and self.trained.serves(weights)

    @rule()
    def somebody_resumes_the_engine(self):
        try:
            self.trained.engine.resume()
        except EngineRefusedError:
            assert self.trained.row[0] == "paused"

    @rule()
    def engine_starts_again(self):
        self.trained.start()
        metadata = {name: (tensor.dtype, tensor.shape) for name, tensor in self.trained.policy.items()}
        for sender in (self.trained.sender, self.other):
            sender.init_all_workers_group(metadata, vllm_engine=self.trained.engine)

    @invariant()
    def one_version_is_served(self):
        assert self.trained.row[0] == "paused" or any(map(self.trained.serves, self.sound))
