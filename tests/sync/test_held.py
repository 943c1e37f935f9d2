"""Messages in any order, with failures between them: what a receiver says it holds is what its model holds."""

from __future__ import annotations

import tempfile

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

import torchrl_ext as tx
from tests.sync.by_hand import invitation, limited, prepared
from tests.sync.ends import made
from torchrl_ext.base.errors import (
    EngineRefusedError,
    IntegrityError,
    NotConnectedError,
    StaleBaseError,
    WeightSyncError,
)
from torchrl_ext.base.messages import Finish, Leave, Prefetch, Reset, Start, State, Verify, stamped
from torchrl_ext.base.types import Part
from torchrl_ext.data.landing.loader import TensorsLoader
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.data.weights.digests import position_digest

NAMES = ("a", "b", "c")


def tensors(content):
    return {name: torch.full((4,), float(value)) for name, value in content.items()}


class Fragile(TensorsLoader):
    """Fails once in the step that it is set to, in the middle of it."""

    fails = None

    def _at(self, step):
        if self.fails == step:
            self.fails = None
            raise RuntimeError(f"{step} broke")

    def load(self, pairs):
        pairs = iter(pairs)
        super().load([next(pairs)])
        self._at("load")
        super().load(pairs)

    def stage(self, changes):
        super().stage(changes)
        self._at("stage")

    def commit(self):
        if self.fails == "commit":
            next(iter(self.targets().values())).add_(0.5)
        self._at("commit")
        super().commit()

    def finish(self):
        self._at("finish")


class Messages(RuleBasedStateMachine):
    """A trainer that may skip steps, begin again or be replaced, and an engine that loads by itself.

    Contents are numbers by name, so that the model's own tensors say which version they hold.
    """

    @initialize(name=st.sampled_from(["memory", "delta", "disk"]))
    def begin(self, name):
        self.count = 0
        self.folder = tempfile.TemporaryDirectory()
        self.model = tensors(dict.fromkeys(NAMES, 0))
        self.loader = Fragile(self.model)
        self.receiver = tx.WeightReceiver(self.loader)
        self.start = self.held
        self.sound = [self.held]  # contents that are one version
        self.versions = {0: self.held}  # of the trainer that joined last, which parts may build on
        self.connection = ""
        self.join(name)

    def teardown(self):
        self.receiver.close()
        self.folder.cleanup()

    @property
    def held(self):
        return {name: float(tensor[0]) for name, tensor in self.model.items()}

    def tell(self, message, *refusals):
        """Tell the worker; return whether it did not fail, and see that what it refuses changes nothing."""
        before = self.held
        try:
            self.receiver.handle(stamped(message, self.connection))
        except refusals:
            assert self.held == before
            return False
        except (WeightSyncError, RuntimeError) as error:
            assert "broke" in str(error) or isinstance(error, (IntegrityError, NotConnectedError)), error
            return False
        return True

    @rule(name=st.sampled_from(["memory", "delta", "disk"]))
    def join(self, name):
        self.count += 1
        self.transport, self.stale = made(name, f"{self.folder.name}/{self.count}"), self.connection
        self.connection = f"connection-{self.count}"
        self.versions, self.update, self.loaded = {0: self.start} if self.held == self.start else {}, None, None
        message = invitation(self.transport, tensors(self.held))
        base = self.receiver.held.base
        self.receiver.handle(structs.replace(message, connection=self.connection))
        if base:
            part = Part(base=base, names=frozenset("a"))
            assert not self.tell(Prefetch(version=base + 1, part=part), StaleBaseError), "that of another trainer"

    @rule(names=st.sets(st.sampled_from(NAMES), max_size=2), back=st.integers(0, 2), told=st.booleans())
    def prefetch(self, names, back, told):
        """Make a version, or one that brings some of its tensors; the worker hears of it, or does not."""
        self.count += 1
        known = sorted(self.versions)
        part = None
        if names and self.transport.abilities.parts and not self.transport.abilities.compares and known:
            part = Part(base=known[max(0, len(known) - 1 - back)], names=frozenset(names))
        content = {name: float(self.count) for name in NAMES}
        if part is not None:
            content = {**self.versions[part.base], **dict.fromkeys(names, float(self.count))}
        source = as_source(tensors(content))
        load = prepared(self.transport, source if part is None else limited(source, part), self.count)
        self.update, self.loaded = (load, part, content), None
        if told and not self.tell(Prefetch(version=self.count, part=part), StaleBaseError):
            self.update = None if part is not None else self.update
        elif told and part is not None:
            rest = {name: value for name, value in self.versions[part.base].items() if name not in names}
            assert rest.items() <= self.held.items(), "a part was taken for another base than the one that is held"

    @rule()
    def start_to_load(self):
        if not self.tell(Start()):
            self.update = None

    @precondition(lambda self: self.update is not None)
    @rule()
    def load_what_was_made(self):
        self.loaded = self.update if self.tell(self.update[0]) else None

    @precondition(lambda self: self.loaded is not None)
    @rule(wrong=st.booleans())
    def verify(self, wrong):
        _, part, content = self.loaded
        named = NAMES if part is None else part.names
        digests = {name: position_digest(tensor).hex() for name, tensor in tensors(content).items() if name in named}
        digests |= {min(named): "0" * 32} if wrong else {}
        if not self.tell(Verify(digests=digests)):
            self.loaded = None
        assert self.loaded is None or not wrong

    @precondition(lambda self: self.loaded is not None)
    @rule()
    def finish_what_was_loaded(self):
        (load, _, content), self.loaded, self.update = self.loaded, None, None
        if self.tell(Finish(version=load.version)):
            assert self.held == content and self.receiver.handle(State())["whole"]
            assert self.receiver.held.base == load.version
            self.versions[load.version] = content
            self.sound.append(content)

    @rule()
    def finish_what_did_not_land(self):
        """A version that was not loaded, or one of two loads."""
        before, version = self.held, self.count + 1 if self.loaded is None else self.loaded[0].version
        with pytest.raises(EngineRefusedError, match=r"(?s)got [01] of its 2 load.*holds (its previous|a part)"):
            self.receiver.handle(stamped(Finish(version=version, loads=2), self.connection))
        assert self.held == before and self.receiver.held.base != version

    @rule(
        names=st.sets(st.sampled_from(NAMES), max_size=2),
        back=st.integers(0, 1),
        told=st.sampled_from([True, True, True, False]),
        breaks=st.sampled_from([None, None, None, "load", "commit"]),
    )
    def update_in_order(self, names, back, told, breaks):
        """Take all steps of an update, as long as none fails."""
        self.prefetch(names, back, told)
        self.loader.fails = breaks
        for step in (self.start_to_load, self.load_what_was_made):
            if self.update is not None:
                step()
        if self.loaded is not None:
            self.finish_what_was_loaded()

    @rule(step=st.sampled_from([Start(), Finish(version=7), Verify(digests={}), State()]))
    def a_replaced_trainer_steps(self, step):
        before, held = self.held, self.receiver.held
        try:
            self.receiver.handle(structs.replace(step, connection=f"{self.stale}-replaced"))
        except EngineRefusedError:
            assert (self.held, self.receiver.held) == (before, held)
        else:
            raise AssertionError("a replaced trainer's step was taken")

    @rule(joins=st.sampled_from([True, True, False]))
    def leave(self, joins):
        self.tell(Leave())
        if joins:
            self.join("delta")

    @rule(step=st.sampled_from(["load", "stage", "commit", "finish"]))
    def something_will_break(self, step):
        self.loader.fails = step

    @rule()
    def give_weights_up(self):
        self.tell(Reset(weights="gone"))
        self.versions, self.loaded = {}, None
        for tensor in self.model.values():
            tensor.fill_(-1.0)

    @rule(breaks=st.booleans())
    def load_by_itself(self, breaks):
        self.count += 1
        self.receiver.invalidate(empty=self.receiver.held.empty, torn=True)
        for name in NAMES[: 1 if breaks else None]:
            self.model[name].fill_(float(self.count))
        self.versions, self.loaded = {}, None
        if not breaks:
            self.sound.append(self.held)
            self.tell(Reset(weights="reloaded"))

    @invariant()
    def what_may_be_served_is_one_version(self):
        state = self.receiver.handle(State())
        if state["whole"] and not state.get("empty") and self.receiver.held.landing is None:
            assert self.held in self.sound, (self.held, self.receiver.held)

    @invariant()
    def a_base_is_the_version_that_is_held(self):
        base = self.receiver.held.base
        assert base is None or base not in self.versions or self.held == self.versions[base]


TestMessages = Messages.TestCase
TestMessages.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
