"""The contract of a transport: subclass it, define how to make the transport, and run it with pytest::

    class TestPigeon(TransportContract):
        name = "pigeon"

        def make_trainer(self, tmp_path):
            return PigeonTransport(tmp_path)

It sends with a `WeightSender` into engines of this process, and every call has a deadline. Test separately what a
transport does between processes, and without a control layer.
"""

from __future__ import annotations

import json
import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import torchrl_ext as tx
from torchrl_ext.base.errors import (
    ConfigError,
    TransportError,
    WeightSyncError,
)
from torchrl_ext.base.messages import Message, read
from torchrl_ext.base.registry import transports
from torchrl_ext.base.types import Info
from torchrl_ext.control.engine import Engine
from torchrl_ext.control.serving.processes import free_port
from torchrl_ext.data.transports.base import Transport
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.data.weights.digests import byte_view
from torchrl_ext.sync.local.module import ModulePort
from torchrl_ext.testing.interrupted import Interrupted

__all__ = [
    "DTYPES",
    "SMALL_BYTES",
    "WAIT_S",
    "TransportContract",
    "any_bits",
    "assert_held",
    "every_bit",
    "free_port",
    "same_bits",
]

WAIT_S = 60
"""Longest wait in a test, in seconds."""

SMALL_BYTES = 4096
"""Bucket or shard size of the ends under test, if they have any; most cases need several."""

DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
]  # fmt: skip
"""The dtypes of weights."""


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


def assert_held(held: Any, weights: Any) -> None:
    """Assert that a module or mapping holds, bit for bit, the tensors of ``weights``."""
    found = dict(as_source(held))
    for name, tensor in as_source(weights):
        assert same_bits(found[name], tensor), name


def _copied(weights: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in as_source(weights)}


@torch.no_grad()
def _train(policy: nn.Module) -> None:
    for parameter in policy.parameters():
        parameter.mul_(1.5)


class _Remote(ModulePort):
    """A module of this process that gets messages as JSON, like an engine in another process."""

    def call(self, message: Message) -> list[Info]:
        return super().call(read(json.loads(json.dumps(message.to_json()))))


def every_bit() -> dict[str, Tensor]:
    """Make tensors of every dtype, form and size; most need several buckets, and many fit into one."""
    floats = torch.tensor([0x7FC00001, 0x7F800001, -1, -(2**31), 0, 0x7F800000], dtype=torch.int32)
    halves = torch.tensor([0x7FC1, 0x7F81, -1, -(2**15), 0, 0x7F80], dtype=torch.int16)
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "special.float32": floats.view(torch.float32),  # NaN payloads, negative zero, infinity
        "special.bfloat16": halves.view(torch.bfloat16),
        "strided.columns": base[:, ::2],
        "strided.transposed": base.t(),
        "strided.expanded": torch.ones(1).expand(5, 3),
    }
    for index, dtype in enumerate(DTYPES):
        for form, shape in {"plain": (37, 11), "scalar": (), "empty": (0, 5), "odd": (2 * index + 1,)}.items():
            tensors[f"{form}.{dtype}"] = any_bits(dtype, *shape, seed=index)
    for index in range(12):
        size = 40 * SMALL_BYTES if index == 5 else 33
        tensors[f"large.{index:02}"] = any_bits(torch.bfloat16, size, seed=index)
    return tensors | {f"small.{index:04}": torch.full((8,), float(index)) for index in range(2000)}


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
    def trainers(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Transport]]:
        """Yield a factory of trainer ends, each with its own directory; shut them all down afterwards."""
        made: list[Transport] = []

        def make() -> Transport:
            made.append(self.make_trainer(tmp_path_factory.mktemp("trainer")))
            return made[-1]

        yield make
        for trainer in made:
            trainer.shutdown()

    @pytest.fixture
    def trainer(self, trainers: Callable[[], Transport]) -> Transport:
        return trainers()

    def test_day_in_the_life(self, trainer: Transport) -> None:
        """A worker joins and follows three versions; another takes its place, and dies; the next update joins anew."""
        policy, first, late = (nn.Linear(6, 5) for _ in range(3))
        sender = tx.WeightSender(trainer, Engine.of(_Remote(first)))
        sender.register_model(policy)
        for version in (1, 2, 3):
            report = sender.update_weights()
            assert (report.version, report.verified) == (version, True)
            assert_held(first, policy)
            _train(policy)
        receiver, before = tx.WeightReceiver(late), _copied(first)
        sender.init_all_workers_group(vllm_engine=Engine.of(_Remote(receiver)))
        assert sender.update_weights().verified
        assert_held(late, policy)
        assert_held(first, before)  # the old one gets nothing more
        _train(policy)
        receiver.close()
        with suppress(WeightSyncError):  # the trainer's end may learn of it only then
            sender.update_weights()
        assert sender.update_weights().verified
        assert_held(late, policy)
        sender.shutdown()
        sender.shutdown()
        assert not sender.check_connection()

    def test_it_is_the_class_behind_its_registered_name(self, trainer: Transport) -> None:
        assert type(trainer) is transports.load(self.name)
        assert trainer.name == self.name

    def test_every_bit_arrives_in_an_engine(self, trainer: Transport) -> None:
        weights = every_bit()
        held = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in weights.items()}
        assert tx.WeightSender(trainer, Engine.of(_Remote(held)), finite=False).update_weights(weights).verified
        assert_held(held, weights)

    def test_source_that_fails_leaves_one_version_or_a_pause(self, trainer: Transport) -> None:
        """In a first update and in a later one; the next update is right."""
        policy, served = (nn.Sequential(nn.Linear(60, 50), nn.Linear(50, 7)) for _ in range(2))
        engine = Engine.of(_Remote(served))
        sender = tx.WeightSender(trainer, engine)

        def fail() -> None:
            raise TransportError("the source broke")

        for _ in range(2):
            before = _copied(served)
            with pytest.raises(WeightSyncError) as caught:  # the end that did not break may report first
                sender.update_weights(Interrupted(policy, fail))
            assert "the source broke" in "".join(traceback.format_exception(caught.value))
            if engine.look()[0].state == "serving":
                assert_held(served, before)
            assert sender.update_weights(policy).verified
            assert engine.look()[0].state == "serving"
            assert_held(served, policy)
            _train(policy)

    def test_engine_follows_the_policy_and_parts_of_it(self, trainer: Transport) -> None:
        """An engine follows the policy; an update of a part leaves the other parameters as they were."""
        policy, served = (nn.Sequential(nn.Linear(60, 50), nn.BatchNorm1d(50)) for _ in range(2))
        sender = tx.WeightSender(trainer, Engine.of(_Remote(served)))
        sender.register_model(policy)
        if not trainer.abilities.parts:
            with pytest.raises(ConfigError, match="whole models only"):
                sender.update_weights(only="1.weight")
            return
        assert not sender.update_weights(only="1.weight").part, "there was nothing to build on"
        for only in (["1.weight", "1.bias"], ["0.bias", "1.weight"], ["1.weight"], None, ["0.weight"]):
            expected = _copied(served)
            _train(policy)
            sent = {name: tensor for name, tensor in as_source(policy) if only is None or name in only}
            report = sender.update_weights(only=only)
            assert (report.part, report.verified, report.tensors) == (only is not None, True, len(sent))
            assert report.bytes < report.model_bytes or only is None
            assert report.model_bytes == sum(tensor.nbytes for _, tensor in as_source(policy))
            assert_held(served, {**expected, **sent})
        sender.shutdown()
        sender.shutdown()

    def test_update_that_cannot_land_is_refused_by_name(self, trainer: Transport) -> None:
        """The error names the parameter that cannot land, and the next update recovers."""
        policy, served = nn.Linear(3, 4), nn.Linear(3, 4)
        before = _copied(served)
        sender = tx.WeightSender(trainer, Engine.of(_Remote(served)))
        with pytest.raises(WeightSyncError, match="weight"):
            sender.update_weights(nn.Linear(5, 4))
        assert_held(served, before)
        assert sender.update_weights(policy).verified
        assert_held(served, policy)
