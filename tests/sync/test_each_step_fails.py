"""Each call of transport and engine fails in turn: what the caller hears, what the engine serves, and what follows."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import torchrl_ext as tx
from torchrl_ext.base.errors import EngineRefusedError, UpdateError
from torchrl_ext.base.registry import transports
from torchrl_ext.sync.local.inprocess import InProcessEngine

BEFORE_THE_PAUSE = ("open", "connect", "prepare", "prefetch", "ahead")
IN_THE_PAUSE = ("begin", "load", "transfer", "verify", "commit")
MOMENTS = ["before", "after"]


class Fault:
    """Raises once, before or after the step that it is set to; remembers which weights each version number got."""

    def __init__(self):
        self.step = self.moment = None
        self.error, self.sent = RuntimeError, {}

    def around(self, step, call, *given):
        self._at(step, "before")
        result = call(*given)
        self._at(step, "after")
        return result

    def _at(self, step, moment):
        if (step, moment) == (self.step, self.moment):
            self.step = None
            raise self.error(f"the {step} broke")


def faulty_transport(name, fault, **settings):
    class Faulty(transports.load(name)):
        def open(self, *given):
            return fault.around("open", super().open, *given)

        def prepare(self, update, within):
            content = {name: tensor.clone() for name, tensor in update.source.whole}
            known = fault.sent.setdefault(update.version, content)
            assert all(torch.equal(known[name], content[name]) for name in content), f"version {update.version} twice"
            handoff = fault.around("prepare", super().prepare, update, within)

            def faulty(step):
                return lambda given: fault.around(step, getattr(handoff, step), given)

            return replace(handoff, **{step: faulty(step) for step in ("ahead", "transfer", "served")})

    return Faulty(**settings)


def faulty_step(step):
    return lambda self, *given: self.fault.around(step, getattr(super(FaultyEngine, self), step), *given)


class FaultyEngine(InProcessEngine):
    connect, prefetch, begin, load, verify, commit = map(
        faulty_step, ("connect", "prefetch", "begin", "load", "verify", "commit")
    )

    def __init__(self, served, fault):
        super().__init__(served)
        self.fault = fault


class Trained:
    """A policy of two tensors, the sender that sends it, and the engine."""

    def __init__(self, name, folder):
        self.policy = {"a": torch.zeros(64), "b": torch.zeros(8)}
        self.fault, settings = Fault(), {} if name == "memory" else {"root": folder}
        self.start()
        self.sender = tx.WeightSender(faulty_transport(name, self.fault, **settings), self.engine)
        self.sender.register_model(self.policy)
        self.parts = name != "disk"

    def start(self):
        """Start an engine at the first weights."""
        self.served = {name: torch.zeros_like(tensor) for name, tensor in self.policy.items()}
        self.engine = FaultyEngine(self.served, self.fault)

    def update(self, *changed, only=None):
        for name in changed:
            self.policy[name] += 1
        return self.sender.update_weights(only=only if self.parts else None)

    def serves(self, weights):
        return all(torch.equal(tensor, weights[name]) for name, tensor in self.served.items())

    @property
    def row(self):
        (row,) = self.engine.rows()
        return row.state, row.version

    def fails(self, step, moment, error=RuntimeError):
        """Fail an update at a step; see who hears what of it, and that whatever the engine may serve is one version."""
        before, version = {name: tensor.clone() for name, tensor in self.served.items()}, self.row[1]
        accepted = self.sender.version
        self.fault.step, self.fault.moment, self.fault.error = step, moment, error
        with pytest.raises(UpdateError if error is RuntimeError else error) as told:
            self.update("a", "b")
        assert self.sender.version == accepted
        if error is RuntimeError:
            number = told.value.report.version
            assert number > accepted and not told.value.report.verified
            what = (
                "the weights" if step in ("open", "connect") else f"weights version {number}"
            )  # numbered from then on
            assert told.value.what.startswith(f"RuntimeError: the {step} broke; {what} did not reach every engine")
            assert str(told.value).count("State:") == 1 and isinstance(told.value.__cause__, RuntimeError)
            assert (told.value.rows[0].state, told.value.rows[0].version) == self.row
        if step in BEFORE_THE_PAUSE or (step, moment) == ("begin", "before"):
            assert self.row == ("serving", version) and self.serves(before)
        elif (step, moment) == ("commit", "after"):
            assert self.row[0] == "serving" and self.serves(self.policy)
        else:
            assert self.row == ("paused", version)
            try:
                self.engine.resume()
            except EngineRefusedError:
                assert self.row == ("paused", version)
            else:
                assert self.serves(before), "nothing landed"

    def recovers(self):
        """The next update is sent whole, whatever was asked for, and parts are sent from then on, if they can be."""
        report = self.update("a", "b", only="b")
        assert not report.part and report.verified and self.serves(self.policy)
        assert self.row == ("serving", report.version) and report.version == self.sender.version
        report = self.update("b", only="b")
        assert report.part == self.parts and report.verified and self.serves(self.policy)


@pytest.mark.parametrize("name", ["memory", "disk", "delta"])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("step", [*BEFORE_THE_PAUSE, *IN_THE_PAUSE])
def test_failing_step_leaves_one_version_in_service(name, step, moment, tmp_path):
    """A step that fails leaves one version in service, and the next update is right."""
    trained = Trained(name, tmp_path)
    for error in (RuntimeError, KeyboardInterrupt):  # in a first update, and in one after others
        trained.fails(step, moment, error)
        trained.recovers()
        if step in ("open", "connect"):
            trained.fails("prepare", "before")  # after which engines join anew
    trained.sender.shutdown()


@pytest.mark.parametrize("name", ["memory", "disk", "delta"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_failure_after_a_version_is_in_service_is_only_logged(name, moment, tmp_path, caplog):
    trained = Trained(name, tmp_path)
    for _ in range(2):
        trained.fault.step, trained.fault.moment, trained.fault.error = "served", moment, OSError
        report = trained.update("a", "b")
        assert report.verified and trained.row == ("serving", report.version) and trained.serves(trained.policy)
        assert f"version {report.version} is in service" in caplog.text and "the served broke" in caplog.text
        caplog.clear()
        assert trained.update("b", only="b").part == trained.parts and trained.serves(trained.policy)
    trained.sender.shutdown()


class Life(RuleBasedStateMachine):
    """Updates of two senders in any order, whole and in part, steps that fail and engines that start again.

    Whatever happened, an engine that is not paused serves one version as one of the senders made it, and an update
    that returns has put the sender's weights there.
    """

    @initialize(name=st.sampled_from(["memory", "disk", "delta"]))
    def begin(self, name):
        self.folder = tempfile.TemporaryDirectory()
        self.trained, self.sound, self.count = Trained(name, f"{self.folder.name}/first"), [], 0
        self.other = tx.WeightSender(tx.make_transport("disk", root=f"{self.folder.name}/other"), self.trained.engine)
        self.made(self.trained.served)

    def teardown(self):
        self.trained.sender.shutdown()
        self.other.shutdown()
        self.folder.cleanup()

    def made(self, weights):
        self.sound.append({name: tensor.clone() for name, tensor in weights.items()})

    def changed(self, names):
        self.count += 1
        for name in names:
            self.trained.policy[name].fill_(self.count)
        self.made(self.trained.policy)

    @rule(names=st.sets(st.sampled_from("ab"), min_size=1), part=st.booleans())
    def update(self, names, part):
        self.changed(names)
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
    def an_update_fails(self, names, part, step, moment, error):
        self.changed(names)
        fault = self.trained.fault
        fault.step, fault.moment, fault.error = step, moment, error
        try:
            report = self.trained.update(only=sorted(names) if part else None)
        except (UpdateError, KeyboardInterrupt):
            assert fault.step is None, "nothing but this fails"
        else:
            assert report.verified and self.trained.serves(self.trained.policy)  # a join that was not needed
        fault.step = None

    @rule()
    def another_sender_updates(self):
        self.count += 1
        weights = {name: torch.full_like(tensor, -self.count) for name, tensor in self.trained.policy.items()}
        self.made(weights)
        assert self.other.update_weights(weights).verified and self.trained.serves(weights)

    @rule()
    def somebody_resumes_the_engine(self):
        try:
            self.trained.engine.resume()
        except EngineRefusedError:
            assert self.trained.row[0] == "paused"

    @rule()
    def the_engine_starts_again(self):
        self.trained.start()
        self.trained.sender.init_all_workers_group(vllm_engine=self.trained.engine)
        self.other.init_all_workers_group(self.metadata, vllm_engine=self.trained.engine)

    @property
    def metadata(self):
        return {name: (tensor.dtype, tensor.shape) for name, tensor in self.trained.policy.items()}

    @invariant()
    def one_version_is_served(self):
        assert self.trained.row[0] == "paused" or any(map(self.trained.serves, self.sound))


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
