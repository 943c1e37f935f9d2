"""Test suites for transports: subclass a suite, define how to make the transport, and run it with pytest::

    class TestPigeon(TransportContract):
        name = "pigeon"

        def make_trainer(self, tmp_path):
            return PigeonTransport(tmp_path)

`TransportContract` sends with a `WeightSender` into engines of this process. `StandaloneContract` is for transports
that also work without a control layer, and takes two ends that connect to each other::

    class TestPigeon(StandaloneContract):
        ...

        def make_ends(self, tmp_path):
            return Ends(PigeonTransport(tmp_path), PigeonTransport(tmp_path))

Both ends run in threads of one process, and every call has a deadline. Test separately what a transport does between
processes.
"""

from __future__ import annotations

import json
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from torch import Tensor, nn
from torchrl.weight_update.weight_sync_schemes import WeightStrategy

import torchrl_ext as tx
from torchrl_ext.errors import (
    ConcurrentUpdateError,
    ConfigError,
    ManifestError,
    NotConnectedError,
    TransportError,
    WeightSyncError,
)
from torchrl_ext.messages import Message, read
from torchrl_ext.registry import transports
from torchrl_ext.rpc.engine import Engine
from torchrl_ext.serving.processes import free_port
from torchrl_ext.sync.engines.local import ModulePort
from torchrl_ext.transports.base import Handoff, Transport, WorkerEnd
from torchrl_ext.transports.standalone import StandaloneTransport
from torchrl_ext.types import Info
from torchrl_ext.weights.digests import byte_view
from torchrl_ext.weights.shards.blocks import Shard
from torchrl_ext.weights.source import MappingSource, as_source

__all__ = [
    "DTYPES",
    "SMALL_BYTES",
    "WAIT_S",
    "Ends",
    "StandaloneContract",
    "TransportContract",
    "any_bits",
    "assert_arrived",
    "assert_held",
    "free_port",
    "same_bits",
]

WAIT_S = 60
"""Longest wait in a test, in seconds."""

SMALL_BYTES = 4096
"""Bucket or shard size of the ends under test, if they have any; most cases need several."""

DTYPES = [
    getattr(torch, name)
    for name in dir(torch)
    if name in {
        "bfloat16", "float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool",
        "float8_e4m3fn", "float8_e5m2",
    }
]  # fmt: skip
"""The dtypes of weights that the installed torch has."""


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Return whether dtype, shape and bytes are equal, NaN payloads and the sign of zero included."""
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(byte_view(left), byte_view(right))


def any_bits(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Make a tensor of random bytes, NaNs and subnormals included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


class Ends:
    """A trainer end and a worker end.

    Args:
        in_group: whether the ends must first form a group with `init_all_workers_group`; others connect on first use.
    """

    def __init__(self, trainer: StandaloneTransport, worker: StandaloneTransport, *, in_group: bool = False) -> None:
        self.trainer, self.worker, self.in_group = trainer, worker, in_group
        self._connected = False

    def connect(self, weights: Any) -> None:
        """Connect both ends at the same time, without an engine, for the parameters of ``weights``."""
        metadata = {meta.name: (meta.dtype, meta.shape) for meta in as_source(weights).params()}
        with ThreadPoolExecutor(2) as pool:
            for end in [pool.submit(side.init_all_workers_group, metadata) for side in (self.trainer, self.worker)]:
                end.result(WAIT_S)
        self._connected = True

    def exchange(self, *sent: Any, **receive: Any) -> Any:
        """Call `send_weights(*sent)` while a thread calls `receive_weights(**receive)`; return the received weights."""
        if self.in_group and not self._connected:
            self.connect(sent[-1])
        with ThreadPoolExecutor(1) as pool:
            arriving = pool.submit(self.worker.receive_weights, WAIT_S, **receive)
            failure = None
            try:
                self.trainer.send_weights(*sent)
            except WeightSyncError as error:  # the worker's own error is the cause and says more
                failure = error
            except BaseException:
                self.worker.abort()  # nothing will come: let the worker's thread end
                raise
            received = arriving.result(WAIT_S)
        if failure is not None:
            raise failure
        assert received is not None, "nothing arrived"
        return received


def assert_arrived(received: Any, weights: Any) -> None:
    """Assert that ``received`` is a flat TensorDict with exactly the tensors of ``weights``, bit for bit."""
    expected = dict(as_source(weights))
    assert isinstance(received, TensorDict)
    assert set(received.keys()) == set(expected)
    for name, tensor in expected.items():
        assert same_bits(received[name], tensor), name


def assert_held(held: Any, weights: Any) -> None:
    """Assert that a module or mapping holds, bit for bit, the tensors of ``weights``."""
    found = dict(as_source(held))
    for name, tensor in as_source(weights):
        assert same_bits(found[name], tensor), name


@torch.no_grad()
def _train(policy: nn.Module) -> None:
    for parameter in policy.parameters():
        parameter.mul_(1.5)


def _causes(error: BaseException | None) -> Iterator[str]:
    """Yield the texts of an error and its causes: the end that did not break may report first."""
    while error is not None:
        yield str(error)
        error = error.__cause__


class _Breaking(MappingSource):
    """A source that fails after its first tensor."""

    def __init__(self, policy: nn.Module, met: list[str]) -> None:
        super().__init__({name: tensor.clone() for name, tensor in as_source(policy)})
        self._met = met

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._broken(super().__iter__())

    def shards(self) -> Iterator[Shard]:
        return self._broken(super().shards())

    def _broken(self, pairs: Iterator[Any]) -> Iterator[Any]:
        yield next(pairs)
        self._met.append("source")
        raise RuntimeError("this step broke")


def _break(trainer: Transport, step: str, patch: pytest.MonkeyPatch, met: list[str]) -> None:
    """Make a step of either end fail after its work, the worst moment; ``met`` records each failure."""

    def broken() -> TransportError:
        met.append(step)
        return TransportError("this step broke")

    def breaking(call: Callable[..., Any]) -> Callable[..., Any]:
        def done(*args: Any, **more: Any) -> Any:
            call(*args, **more)
            raise broken()

        return done

    def then(call: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
        return lambda *args, **more: change(call(*args, **more))

    def within(handoff: Handoff, name: str) -> Handoff:
        changed: dict[str, Any] = {name: breaking(getattr(handoff, name))}
        return replace(handoff, **changed)

    def received(pairs: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        yield next(pairs)
        raise broken()

    def joined(end: WorkerEnd) -> WorkerEnd:
        call = getattr(end, step)
        patch.setattr(end, step, breaking(call) if step == "stage" else then(call, received))
        return end

    kind = type(trainer)
    match step:
        case "open" | "prepare":
            patch.setattr(trainer, step, breaking(getattr(trainer, step)))
        case "open.transfer":
            patch.setattr(trainer, "open", then(trainer.open, lambda handoff: within(handoff, "transfer")))
        case "ahead" | "transfer" | "served":
            patch.setattr(trainer, "prepare", then(trainer.prepare, lambda handoff: within(handoff, step)))
        case "join":
            patch.setattr(kind, "join", breaking(kind.join))
        case "stage" | "receive":
            patch.setattr(kind, "join", then(kind.join, joined))


class _Remote(ModulePort):
    """A module of this process that gets messages as JSON, like an engine in another process."""

    def tell(self, message: Message) -> list[Info]:
        return super().tell(read(json.loads(json.dumps(message.to_json()))))


def _remote(served: Any) -> Engine:
    return Engine(_Remote(served))


def _every_bit() -> Iterator[tuple[str, Tensor]]:
    for dtype in DTYPES:
        for form, shape in {"plain": (37, 11), "scalar": (), "empty": (0, 5)}.items():
            yield f"{dtype}.{form}", any_bits(dtype, *shape)


def _special() -> Iterator[tuple[str, Tensor]]:
    bits = torch.tensor([0x7FC00001, 0x7F800001, -1, -(2**31), 0, 0x7F800000], dtype=torch.int32)
    halves = torch.tensor([0x7FC1, 0x7F81, -1, -(2**15), 0, 0x7F80], dtype=torch.int16)
    yield from {"single": bits.view(torch.float32), "brain": halves.view(torch.bfloat16)}.items()


def _strided() -> Iterator[tuple[str, Tensor]]:
    base = torch.arange(24.0).reshape(4, 6)
    yield from {"columns": base[:, ::2], "transposed": base.t(), "expanded": torch.ones(1).expand(5, 3)}.items()


_WEIGHTS: dict[str, Callable[[], Iterable[tuple[str, Tensor]]]] = {
    "every dtype, plain, scalar and empty": _every_bit,
    "odd sizes side by side": lambda: (
        (f"{i:02d}.{dtype}", any_bits(dtype, 2 * i + 1, seed=i)) for i, dtype in enumerate(DTYPES)
    ),
    "NaN payloads and negative zero": _special,
    "strided, in logical order": _strided,
    "larger than a bucket between small ones": lambda: (
        (f"{i:02d}", any_bits(torch.bfloat16, 40 * SMALL_BYTES if i == 5 else 33, seed=i)) for i in range(12)
    ),
    "thousands of small ones": lambda: ((f"layer.{i:04d}", torch.full((8,), float(i))) for i in range(2000)),
}


class TransportContract(ABC):
    """Tests that every transport must pass; name the subclass ``Test...`` and define `name` and `make_trainer`.

    Attributes:
        name: the transport's registered name.
    """

    name: ClassVar[str]

    @abstractmethod
    def make_trainer(self, tmp_path: Path) -> Transport:
        """Make a trainer end for one in-process engine worker; buckets or shards, if any, hold `SMALL_BYTES`.

        Args:
            tmp_path: an empty directory for the end.
        """

    @pytest.fixture
    def trainers(self, tmp_path: Path) -> Iterator[Callable[[], Transport]]:
        """Yield a factory of trainer ends, each with its own directory; shut them all down afterwards."""
        made: list[Transport] = []

        def make() -> Transport:
            folder = tmp_path / f"trainer{len(made)}"
            folder.mkdir()
            made.append(self.make_trainer(folder))
            return made[-1]

        yield make
        for trainer in made:
            trainer.shutdown()

    @pytest.fixture
    def trainer(self, trainers: Callable[[], Transport]) -> Transport:
        return trainers()

    def test_it_is_the_class_behind_its_registered_name(self, trainer: Transport) -> None:
        assert type(trainer) is transports.load(self.name)
        assert trainer.name == self.name

    @pytest.mark.parametrize("case", _WEIGHTS)
    def test_every_bit_arrives_in_an_engine(self, trainer: Transport, case: str) -> None:
        weights = dict(_WEIGHTS[case]())
        held = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in weights.items()}
        assert tx.WeightSender(trainer, _remote(held)).update_weights(weights).verified
        assert_held(held, weights)

    def test_a_worker_that_is_replaced_gets_the_next_version_and_the_old_one_nothing_more(
        self, trainer: Transport
    ) -> None:
        policy, first, second = (nn.Linear(6, 5) for _ in range(3))
        sender = tx.WeightSender(trainer, _remote(first))
        sender.register_model(policy)
        for served in (first, second):
            assert sender.update_weights().verified
            assert_held(served, policy)
            _train(policy)
            if served is first:
                before = {name: tensor.clone() for name, tensor in as_source(first)}
                sender.init_all_workers_group(vllm_engine=_remote(second))
        assert_held(first, before)
        assert sender.update_weights().verified
        assert_held(second, policy)

    @pytest.mark.parametrize("shared", [True, False], ids=["one client", "a client each"])
    def test_two_senders_take_turns_on_one_engine(self, trainers: Callable[[], Transport], shared: bool) -> None:
        held = nn.Linear(6, 5)
        receiver = tx.WeightReceiver(held)
        client = _remote(receiver)
        policies = [nn.Linear(6, 5) for _ in range(2)]
        senders = [tx.WeightSender(trainers(), client if shared else _remote(receiver)) for _ in policies]
        for turn in (0, 1, 0, 0, 1, 1, 0):
            _train(policies[turn])
            assert senders[turn].update_weights(policies[turn]).verified
            assert_held(held, policies[turn])

    @pytest.mark.parametrize(
        "step", ["open", "open.transfer", "prepare", "ahead", "transfer", "source", "join", "stage", "receive"]
    )
    def test_a_step_that_fails_leaves_one_version_or_a_paused_engine_and_the_next_update_is_right(
        self, trainer: Transport, step: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        policy, served = (nn.Sequential(nn.Linear(60, 50), nn.Linear(50, 7)) for _ in range(2))
        engine = _remote(served)
        sender = tx.WeightSender(trainer, engine)
        sender.register_model(policy)
        met: list[str] = []  # broken steps; a worker may receive one version and stage the next
        for _ in range(2):
            before, known, failed = {name: tensor.clone() for name, tensor in as_source(served)}, len(met), False
            with monkeypatch.context() as patch:
                _break(trainer, step, patch, met)
                try:
                    if step in ("open", "open.transfer", "join", "stage", "receive"):
                        sender.init_all_workers_group(vllm_engine=engine)
                    sender.update_weights(_Breaking(policy, met) if step == "source" else None)
                except WeightSyncError as error:
                    assert any("this step broke" in words for words in _causes(error))
                    failed = True
            assert failed == (len(met) > known)
            if engine.rows()[0].state == "serving":
                assert_held(served, before if failed else policy)
            _train(policy)
            if step.startswith("open"):
                sender.init_all_workers_group(vllm_engine=engine)
            assert sender.update_weights().verified
            assert engine.rows()[0].state == "serving"
            assert_held(served, policy)
        assert met

    def test_an_update_is_in_service_even_where_its_transport_fails_afterwards(
        self, trainer: Transport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        policy, served = nn.Linear(6, 5), nn.Linear(6, 5)
        sender, met = tx.WeightSender(trainer, _remote(served)), list[str]()
        with monkeypatch.context() as patch:
            _break(trainer, "served", patch, met)
            assert sender.update_weights(policy).verified
        assert met == ["served"]
        assert_held(served, policy)
        _train(policy)
        assert sender.update_weights(policy).verified
        assert_held(served, policy)

    def test_a_sender_keeps_an_in_process_engine_at_the_policy(self, trainer: Transport) -> None:
        policy, served = (nn.Sequential(nn.Linear(60, 50), nn.BatchNorm1d(50)) for _ in range(2))
        sender = tx.WeightSender(trainer, _remote(served))
        sender.register_model(policy)
        for step in range(1, 4):
            with torch.no_grad():
                policy.get_parameter("0.weight").add_(step)
            report = sender.update_weights()
            assert report.version == step
            assert report.verified
            assert report.engines[0].state == "serving"
            assert report.model_bytes == sum(tensor.nbytes for _, tensor in as_source(policy))
            assert report.bytes == report.model_bytes or step > 1  # the first update is a full one everywhere
            assert_held(served, policy)
        sender.shutdown()
        sender.shutdown()

    def test_a_part_of_the_model_arrives_alone_and_the_rest_stays_as_it_was(self, trainer: Transport) -> None:
        policy, served = (nn.Sequential(nn.Linear(60, 50), nn.Linear(50, 7)) for _ in range(2))
        sender = tx.WeightSender(trainer, _remote(served))
        sender.register_model(policy)
        assert not sender.update_weights(only="1").part, "there was nothing to build on"
        for only in (["1.weight", "1.bias"], ["0.bias", "1.weight"], ["1.weight"], None, ["0.weight"]):
            expected = {name: tensor.clone() for name, tensor in as_source(served)}
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.mul_(1.5)
            sent = {name: tensor for name, tensor in as_source(policy) if only is None or name in only}
            report = sender.update_weights(only=only)
            assert (report.part, report.verified, report.tensors) == (only is not None, True, len(sent))
            assert report.bytes < report.model_bytes or only is None
            for name, held in as_source(served):
                assert same_bits(held, sent.get(name, expected[name])), name
        sender.shutdown()

    def test_an_update_that_cannot_land_fails_by_name_and_the_next_one_recovers(self, trainer: Transport) -> None:
        policy, served = nn.Linear(3, 4), nn.Linear(3, 4)
        before = served.weight.detach().clone()
        sender = tx.WeightSender(trainer, _remote(served))
        with pytest.raises(WeightSyncError, match="weight"):
            sender.update_weights(nn.Linear(5, 4))
        assert same_bits(served.weight.detach(), before)
        assert sender.update_weights(policy).verified
        assert same_bits(served.weight.detach(), policy.weight.detach())
        sender.shutdown()


class StandaloneContract(TransportContract):
    """Tests for transports that also work without a control layer; define `make_ends` as well."""

    @abstractmethod
    def make_ends(self, tmp_path: Path) -> Ends:
        """Make two unconnected ends that can find each other; buckets or shards, if any, hold `SMALL_BYTES`.

        Args:
            tmp_path: an empty directory for both ends, which no other test uses.
        """

    @pytest.fixture
    def make(self, tmp_path: Path) -> Iterator[Callable[[str], Ends]]:
        """Yield a factory of pairs of ends by name, each with its own directory; shut them all down afterwards."""
        made: list[Ends] = []

        def make(name: str) -> Ends:
            (tmp_path / name).mkdir()
            made.append(self.make_ends(tmp_path / name))
            return made[-1]

        yield make
        for ends in made:
            ends.worker.shutdown()
            ends.trainer.shutdown()

    @pytest.fixture
    def ends(self, make: Callable[[str], Ends]) -> Ends:
        return make("ends")

    @pytest.mark.parametrize("case", _WEIGHTS)
    def test_every_bit_arrives(self, ends: Ends, case: str) -> None:
        weights = dict(_WEIGHTS[case]())
        assert_arrived(ends.exchange("policy", weights), weights)

    def test_tied_tensors_travel_once_under_their_first_name(self, ends: Ends) -> None:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        received = ends.exchange("policy", model)
        assert set(received.keys()) == {"0.weight"}
        assert same_bits(received["0.weight"], model.get_parameter("0.weight").detach())

    def test_weights_may_come_in_every_form(self, make: Callable[[str], Ends]) -> None:
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        nested = TensorDict.from_module(module).data.clone()
        forms = {
            "nested TensorDict": nested,
            "TensorDictParams": TensorDictParams(nested.clone()),
            "nested mapping": {"a": {"b": torch.randn(2)}, ("c", "d"): torch.randn(3), "e.f": torch.randn(1)},
            "module": module,
            "source": MappingSource({"x": torch.randn(5)}),
        }
        for form, weights in forms.items():
            assert_arrived(make(form).exchange("policy", weights), weights)

    def test_weights_may_be_sent_without_a_model_id(self, ends: Ends) -> None:
        weights = {"x": torch.randn(5)}
        assert_arrived(ends.exchange(weights), weights)

    def test_given_weights_are_filled_in_place(self, ends: Ends) -> None:
        sent = TensorDict({"a": {"b": torch.randn(40, 50), "c": torch.randn(3)}}, [])
        held = TensorDict({"a": {"b": torch.zeros(50, 40).t(), "c": torch.zeros(3)}}, [])
        before = {key: held[key].data_ptr() for key in (("a", "b"), ("a", "c"))}
        received = ends.exchange("policy", sent, weights=held)
        assert_arrived(received, sent)
        for key, pointer in before.items():
            assert held[key].data_ptr() == pointer
            assert same_bits(held[key], sent[key])

    @pytest.mark.parametrize("into", ["weights", "model"])
    def test_a_module_takes_the_weights_in_place(self, ends: Ends, into: Any) -> None:
        sent, held = nn.Sequential(nn.Linear(3, 4)), nn.Sequential(nn.Linear(3, 4))
        parameter = held[0].weight
        assert_arrived(ends.exchange("policy", sent, **{into: held}), sent)
        assert held[0].weight is parameter
        assert same_bits(held.get_parameter("0.weight").detach(), sent.get_parameter("0.weight").detach())

    @pytest.mark.parametrize("extract_as", ["tensordict", "state_dict"])
    @pytest.mark.filterwarnings("ignore:state_dict strategy")
    def test_a_torchrl_strategy_applies_them_to_a_nested_model(self, ends: Ends, extract_as: Any) -> None:
        sent, held = (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)) for _ in range(2))
        ends.exchange("policy", sent, model=held, strategy=WeightStrategy(extract_as))
        for left, right in zip(sent.parameters(), held.parameters(), strict=True):
            assert same_bits(left.detach(), right.detach())

    def test_nothing_new_is_none_within_the_timeout(self, ends: Ends) -> None:
        ends.connect({"x": torch.zeros(3)})
        assert ends.worker.receive_weights(0.05) is None
        ends.exchange("policy", {"x": torch.zeros(3)})
        assert ends.worker.receive_weights(0.05) is None
        assert ends.worker.receive_weights(0.0) is None

    def test_one_version_after_the_other_arrives_and_older_ones_stay_what_they_were(self, ends: Ends) -> None:
        weights = {"a": torch.zeros(700), "b": torch.zeros(5, dtype=torch.bfloat16)}
        seen = []
        for step in range(4):
            for tensor in weights.values():
                tensor.fill_(step)
            seen.append(ends.exchange("policy", weights))
        for step, received in enumerate(seen):
            assert all(bool((received[name] == step).all()) for name in weights)
        assert ends.worker.received_version == 4
        assert ends.trainer.latest_version() == 4

    def test_a_second_send_at_the_same_time_is_refused_and_the_first_one_arrives(self, ends: Ends) -> None:
        inside, go_on = threading.Event(), threading.Event()
        weights = {"x": torch.randn(5)}

        class Slow(MappingSource):
            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                inside.set()
                assert go_on.wait(WAIT_S)
                yield from super().__iter__()

            def shards(self) -> Iterator[Shard]:
                inside.set()
                assert go_on.wait(WAIT_S)
                yield from super().shards()

        ends.connect(weights)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(ends.exchange, "policy", Slow(weights))
            assert inside.wait(WAIT_S)
            with pytest.raises(ConcurrentUpdateError, match="the running send goes on"):
                ends.trainer.send_weights("policy", weights)
            go_on.set()
            assert_arrived(first.result(WAIT_S), weights)

    @pytest.mark.parametrize("into", ["weights", "model"])
    def test_a_parameter_that_cannot_land_is_named_and_changes_nothing(
        self, make: Callable[[str], Ends], into: Any
    ) -> None:
        cases = {
            "unknown to the receiver": ({"a": torch.zeros(3)}, "b.c"),
            "missing from the update": ({"a": torch.zeros(3), "b.c": torch.zeros(2), "d": torch.zeros(1)}, "'d'"),
            "of another shape": ({"a": torch.zeros(3), "b.c": torch.zeros(1, 2)}, "b.c"),
            "of another dtype": ({"a": torch.zeros(3, dtype=torch.bfloat16), "b.c": torch.zeros(2)}, "'a'"),
        }
        for case, (held, named) in cases.items():
            target = held if into == "weights" else TensorDict(held, [])
            with pytest.raises(ManifestError, match=named):
                make(case).exchange("policy", {"a": torch.ones(3), "b": {"c": torch.ones(2)}}, **{into: target})
            assert all(not tensor.any() for tensor in held.values()), case

    @pytest.mark.parametrize("into", ["weights", "model"])
    def test_an_object_without_tensors_is_refused_at_once(self, ends: Ends, into: Any) -> None:
        with pytest.raises(ConfigError, match="weights cannot land in a list"):
            ends.worker.receive_weights(None, **{into: [torch.zeros(3)]})

    def test_a_bare_send_connects_until_the_shutdown(self, ends: Ends) -> None:
        assert not ends.trainer.check_connection()
        assert not ends.worker.check_connection()
        if ends.in_group:
            with pytest.raises(NotConnectedError):
                ends.trainer.send_weights("policy", {"x": torch.zeros(3)})
        ends.exchange("policy", {"x": torch.zeros(3)})
        assert ends.trainer.check_connection()
        assert ends.worker.check_connection()
        for end in (ends.worker, ends.trainer):
            end.shutdown()
            end.shutdown()
            assert not end.check_connection()
