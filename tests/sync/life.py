"""The life of a transport as a state machine: updates of two senders that fail at any step, engines that start anew.

Whatever happened, an engine that is not paused serves one version as one of the senders made it, and an update that
returns has put the sender's weights there::

    class PigeonLife(TransportLife):
        def make_trainer(self, folder):
            return PigeonTransport(folder)

    TestPigeonLife = PigeonLife.TestCase
    TestPigeonLife.settings = hypothesis.settings(max_examples=25, stateful_step_count=20, deadline=None)
"""

from __future__ import annotations

import tempfile
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

import torchrl_ext as tx
from torchrl_ext.base.errors import EngineRefusedError, UpdateError
from torchrl_ext.base.messages import Message
from torchrl_ext.base.types import Info
from torchrl_ext.control.engine import Engine
from torchrl_ext.data.transports.base import Transport
from torchrl_ext.sync.local.module import ModulePort

__all__ = ["BEFORE_THE_PAUSE", "IN_THE_PAUSE", "MOMENTS", "Fault", "Trained", "TransportLife"]

BEFORE_THE_PAUSE = ("open", "join", "prepare", "prefetch", "ahead")
IN_THE_PAUSE = ("start", "load", "transfer", "verify", "finish")
"""The steps of an update: calls of a transport, and messages to an engine."""
MOMENTS = ("before", "after")


@final
class Fault:
    """Raises once, before or after the step that it is set to; checks that no version number is used twice."""

    def __init__(self) -> None:
        self.step: str | None = None
        self.moment = "before"
        self.error: type[BaseException] = RuntimeError
        self._sent: dict[int, dict[str, Tensor]] = {}

    def arm(self, step: str | None, moment: str = "before", error: type[BaseException] = RuntimeError) -> None:
        """Have the next call of ``step`` raise ``error`` before or after its work; None for no step."""
        self.step, self.moment, self.error = step, moment, error

    def around(self, step: str, call: Callable[..., Any], *given: Any) -> Any:
        """Make a call, and raise where it is the one."""
        self._at(step, "before")
        result = call(*given)
        self._at(step, "after")
        return result

    def _at(self, step: str, moment: str) -> None:
        if (step, moment) == (self.step, self.moment):
            self.step = None
            raise self.error(f"the {step} broke")

    def in_transport(self, transport: Transport) -> Transport:
        """Return the same transport, whose steps may fail from here on."""
        opening, preparing = transport.open, transport.prepare

        def stepped(name: str, handoff: Any) -> Any:
            step = getattr(handoff, name)
            return lambda given: self.around(name, step, given)

        def opened(*given: Any) -> Any:
            return self.around("open", opening, *given)

        def prepared(update: Any, within: Any) -> Any:
            content = {name: tensor.clone() for name, tensor in update.source.whole}
            known = self._sent.setdefault(update.version, content)
            assert all(torch.equal(known[name], content[name]) for name in content), f"version {update.version} twice"
            handoff = self.around("prepare", preparing, update, within)
            return replace(handoff, **{name: stepped(name, handoff) for name in ("ahead", "transfer", "served")})

        vars(transport).update(open=opened, prepare=prepared)
        return transport


@final
class _FaultyPort(ModulePort):
    def __init__(self, served: Any, fault: Fault) -> None:
        super().__init__(served)
        self._fault = fault

    def call(self, message: Message) -> list[Info]:
        answers: list[Info] = self._fault.around(message.kind, super().call, message)
        return answers


class Trained:
    """A policy of two tensors, the sender that sends it, and the engine that serves it.

    Args:
        transport: the trainer's end.
    """

    def __init__(self, transport: Transport) -> None:
        self.policy = {"a": torch.zeros(64), "b": torch.zeros(8)}
        self.fault, self.parts = Fault(), transport.abilities.parts
        self.start()
        self.sender = tx.WeightSender(self.fault.in_transport(transport), self.engine)
        self.sender.register_model(self.policy)

    def start(self) -> None:
        """Start an engine at the first weights."""
        self.served = {name: torch.zeros_like(tensor) for name, tensor in self.policy.items()}
        self.engine = Engine.of(_FaultyPort(self.served, self.fault))

    def update(self, *changed: str, only: Any = None) -> Any:
        """Change tensors of the policy, and send all of it, or a part where the transport can."""
        for name in changed:
            self.policy[name] += 1
        return self.sender.update_weights(only=only if self.parts else None)

    def serves(self, weights: dict[str, Tensor]) -> bool:
        """Return whether the engine holds these weights, bit for bit."""
        return all(torch.equal(tensor, weights[name]) for name, tensor in self.served.items())

    @property
    def row(self) -> tuple[str, int | None]:
        """State and version of the engine, as it says."""
        (row,) = self.engine.look()
        return row.state, row.version


class TransportLife(RuleBasedStateMachine):
    """Updates in any order, whole and in part; a subclass makes the transport."""

    @abstractmethod
    def make_trainer(self, folder: Path) -> Transport:
        """Make a trainer's end for one worker of an engine in this process; ``folder`` is empty and its own."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        folder = Path(self.folder.name)
        (folder / "first").mkdir()
        self.trained, self.count = Trained(self.make_trainer(folder / "first")), 0
        self.sound: list[dict[str, Tensor]] = []
        (folder / "second").mkdir()
        self.other = tx.WeightSender(self.make_trainer(folder / "second"), self.trained.engine)
        self._made(self.trained.served)

    def teardown(self) -> None:
        self.trained.sender.shutdown()
        self.other.shutdown()
        self.folder.cleanup()

    def _made(self, weights: dict[str, Tensor]) -> None:
        self.sound.append({name: tensor.clone() for name, tensor in weights.items()})

    def _changed(self, names: Any) -> None:
        self.count += 1
        for name in names:
            self.trained.policy[name].fill_(self.count)
        self._made(self.trained.policy)

    @rule(names=st.sets(st.sampled_from("ab"), min_size=1), part=st.booleans())
    def update(self, names: Any, part: bool) -> None:
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
    def update_fails(self, names: Any, part: bool, step: str, moment: str, error: type[BaseException]) -> None:
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
    def another_sender_updates(self) -> None:
        self.count += 1
        weights = {name: torch.full_like(tensor, -self.count) for name, tensor in self.trained.policy.items()}
        self._made(weights)
        assert self.other.update_weights(weights).verified and self.trained.serves(weights)

    @rule()
    def somebody_resumes_the_engine(self) -> None:
        try:
            self.trained.engine.resume()
        except EngineRefusedError:
            assert self.trained.row[0] == "paused"

    @rule()
    def engine_starts_again(self) -> None:
        self.trained.start()
        metadata = {name: (tensor.dtype, tensor.shape) for name, tensor in self.trained.policy.items()}
        for sender in (self.trained.sender, self.other):
            sender.init_all_workers_group(metadata, vllm_engine=self.trained.engine)

    @invariant()
    def one_version_is_served(self) -> None:
        assert self.trained.row[0] == "paused" or any(map(self.trained.serves, self.sound))
