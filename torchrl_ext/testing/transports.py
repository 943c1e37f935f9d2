"""Tests of what every transport promises: subclass `TransportContract`, give it ends, and run it by pytest::

    class TestPigeon(TransportContract):
        name = "pigeon"

        def make_ends(self, tmp_path):
            return Ends(PigeonTransport(tmp_path), PigeonTransport(tmp_path))

        def make_trainer(self, tmp_path):
            return PigeonTransport(tmp_path)

Both ends run in threads of one process here, each call with a deadline; what a transport does between processes is
tested beside it.
"""

from __future__ import annotations

import json
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from torch import Tensor, nn
from torchrl.weight_update.weight_sync_schemes import WeightStrategy

import torchrl_ext as tx
from torchrl_ext.errors import ConcurrentUpdateError, ManifestError, WeightSyncError
from torchrl_ext.launch.processes import free_port
from torchrl_ext.registry import transports
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.transports.standalone import StandaloneTransport
from torchrl_ext.weights.digests import byte_view
from torchrl_ext.weights.shards.blocks import Shard
from torchrl_ext.weights.source import MappingSource, as_source

__all__ = [
    "DTYPES",
    "SMALL_BYTES",
    "WAIT_S",
    "Ends",
    "TransportContract",
    "any_bits",
    "assert_arrived",
    "free_port",
    "same_bits",
]

WAIT_S = 60
"""Seconds that any wait of a test may take."""

SMALL_BYTES = 4096
"""Bucket or shard size of the ends under test, where a transport has buckets or shards: most cases take several."""

DTYPES = [
    getattr(torch, name)
    for name in dir(torch)
    if name in {
        "bfloat16", "float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool",
        "float8_e4m3fn", "float8_e5m2",
    }
]  # fmt: skip
"""Every dtype in which weights are kept, as far as this release of torch has it."""


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Return whether dtype, shape and bytes are equal: NaN payloads and the sign of zero count."""
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(byte_view(left), byte_view(right))


def any_bits(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Make a tensor of random bytes: every payload, NaNs and subnormals included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


class Ends:
    """A trainer end and a worker end, connected on first use.

    Args:
        trainer: sends.
        worker: receives.
    """

    def __init__(self, trainer: StandaloneTransport, worker: StandaloneTransport) -> None:
        self.trainer, self.worker = trainer, worker
        self._connected = False

    def connect(self, weights: Any) -> None:
        """Connect both ends at the same time, without an engine, for the parameters of ``weights``."""
        metadata = {meta.name: (meta.dtype, meta.shape) for meta in as_source(weights).params()}
        with ThreadPoolExecutor(2) as pool:
            for end in [pool.submit(side.init_all_workers_group, metadata) for side in (self.trainer, self.worker)]:
                end.result(WAIT_S)
        self._connected = True

    def exchange(self, *sent: Any, **receive: Any) -> Any:
        """Call `send_weights(*sent)` beside `receive_weights(**receive)`; return what came."""
        if not self._connected:
            self.connect(sent[-1])
        with ThreadPoolExecutor(1) as pool:
            arriving = pool.submit(self.worker.receive_weights, WAIT_S, **receive)
            failure = None
            try:
                self.trainer.send_weights(*sent)
            except WeightSyncError as error:  # the worker's own error is the cause, and more telling
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
    """Assert that ``received`` is a TensorDict with flat keys and, bit for bit, the tensors of ``weights``."""
    expected = dict(as_source(weights))
    assert isinstance(received, TensorDict)
    assert set(received.keys()) == set(expected)
    for name, tensor in expected.items():
        assert same_bits(received[name], tensor), name


class _Remote(InProcessEngine):
    """An engine of this process, told everything in JSON, as one of another process is."""

    def connect(self, info: dict[str, Any], on_failure: Callable[[], None] = lambda: None) -> None:
        super().connect(json.loads(json.dumps(info)), on_failure)

    def load(self, info: dict[str, Any], on_failure: Callable[[], None] = lambda: None) -> None:
        super().load(json.loads(json.dumps(info)), on_failure)


class TransportContract(ABC):
    """The tests that every transport passes: derive a class that is named ``Test...``, and give it a name and ends.

    Attributes:
        name: under which the transport is registered.
    """

    name: ClassVar[str]

    @abstractmethod
    def make_ends(self, tmp_path: Path) -> Ends:
        """Make fresh, unconnected ends that meet; their buckets or shards, if there are any, hold `SMALL_BYTES`.

        Args:
            tmp_path: an empty directory for them, of this test alone.
        """

    @abstractmethod
    def make_trainer(self, tmp_path: Path) -> StandaloneTransport:
        """Make a trainer end for one in-process engine worker.

        Args:
            tmp_path: as for `make_ends`.
        """

    @pytest.fixture
    def make(self, tmp_path: Path) -> Iterator[Callable[[str], Ends]]:
        """Yield what makes a pair of ends by name, in a directory of its own; shut all pairs down afterwards."""
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
        """Return one pair of ends."""
        return make("ends")

    def test_it_is_the_class_behind_its_registered_name(self, ends: Ends) -> None:
        assert type(ends.trainer) is transports.load(self.name)
        assert ends.trainer.name == self.name

    def test_every_bit_of_every_dtype_arrives(self, ends: Ends) -> None:
        weights = {
            f"{dtype}.{form}": any_bits(dtype, *shape)
            for dtype in DTYPES
            for form, shape in {"plain": (37, 11), "scalar": (), "empty": (0, 5)}.items()
        }
        assert_arrived(ends.exchange("policy", weights), weights)

    def test_mixed_dtypes_and_odd_sizes_arrive_side_by_side(self, ends: Ends) -> None:
        weights = {f"{i:02d}.{dtype}": any_bits(dtype, 2 * i + 1, seed=i) for i, dtype in enumerate(DTYPES)}
        assert_arrived(ends.exchange("policy", weights), weights)

    def test_nan_payloads_and_negative_zero_survive(self, ends: Ends) -> None:
        bits = torch.tensor([0x7FC00001, 0x7F800001, -1, -(2**31), 0, 0x7F800000], dtype=torch.int32)
        halves = torch.tensor([0x7FC1, 0x7F81, -1, -(2**15), 0, 0x7F80], dtype=torch.int16)
        weights = {"single": bits.view(torch.float32), "brain": halves.view(torch.bfloat16)}
        received = ends.exchange("policy", weights)
        assert torch.equal(received["single"].view(torch.int32), bits)
        assert torch.equal(received["brain"].view(torch.int16), halves)

    def test_strided_tensors_arrive_in_logical_order(self, ends: Ends) -> None:
        base = torch.arange(24.0).reshape(4, 6)
        weights = {"columns": base[:, ::2], "transposed": base.t(), "expanded": torch.ones(1).expand(5, 3)}
        assert_arrived(ends.exchange("policy", weights), weights)

    def test_tied_tensors_travel_once_under_their_first_name(self, ends: Ends) -> None:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        received = ends.exchange("policy", model)
        assert set(received.keys()) == {"0.weight"}
        assert same_bits(received["0.weight"], model.get_parameter("0.weight").detach())

    def test_tensors_larger_than_a_bucket_arrive_between_small_ones(self, ends: Ends) -> None:
        weights = {f"{i:02d}": any_bits(torch.bfloat16, 40 * SMALL_BYTES if i == 5 else 33, seed=i) for i in range(12)}
        assert_arrived(ends.exchange("policy", weights), weights)

    def test_thousands_of_small_tensors_arrive(self, ends: Ends) -> None:
        weights = {f"layer.{i:04d}": torch.full((8,), float(i)) for i in range(2000)}
        assert_arrived(ends.exchange("policy", weights), weights)

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

    def test_a_model_takes_the_weights_in_place(self, ends: Ends) -> None:
        sent, held = nn.Sequential(nn.Linear(3, 4)), nn.Sequential(nn.Linear(3, 4))
        parameter = held[0].weight
        assert_arrived(ends.exchange("policy", sent, model=held), sent)
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

    def test_a_connection_lives_from_its_start_to_its_shutdown(self, ends: Ends) -> None:
        assert not ends.trainer.check_connection()
        assert not ends.worker.check_connection()
        ends.exchange("policy", {"x": torch.zeros(3)})
        assert ends.trainer.check_connection()
        assert ends.worker.check_connection()
        for end in (ends.worker, ends.trainer):
            end.shutdown()
            end.shutdown()
            assert not end.check_connection()

    def test_a_sender_keeps_an_in_process_engine_at_the_policy(self, tmp_path: Path) -> None:
        policy, served = (nn.Sequential(nn.Linear(60, 50), nn.BatchNorm1d(50)) for _ in range(2))
        transport = self.make_trainer(tmp_path)
        sender = tx.WeightSender(transport, _Remote(served))
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
            for (name, sent), (_, held) in zip(as_source(policy), as_source(served), strict=True):
                assert same_bits(sent, held), name
        sender.shutdown()
        sender.shutdown()

    def test_a_part_of_the_model_arrives_alone_and_the_rest_stays_as_it_was(self, tmp_path: Path) -> None:
        policy, served = (nn.Sequential(nn.Linear(60, 50), nn.Linear(50, 7)) for _ in range(2))
        sender = tx.WeightSender(self.make_trainer(tmp_path), _Remote(served))
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

    def test_an_update_that_cannot_land_fails_by_name_and_the_next_one_recovers(self, tmp_path: Path) -> None:
        policy, served = nn.Linear(3, 4), nn.Linear(3, 4)
        before = served.weight.detach().clone()
        sender = tx.WeightSender(self.make_trainer(tmp_path), _Remote(served))
        with pytest.raises(WeightSyncError, match="weight"):
            sender.update_weights(nn.Linear(5, 4))
        assert same_bits(served.weight.detach(), before)
        assert sender.update_weights(policy).verified
        assert same_bits(served.weight.detach(), policy.weight.detach())
        sender.shutdown()
