"""The contract of transports that also work without a control layer."""

from __future__ import annotations

import threading
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from tensordict import TensorDict

from torchrl_ext.base.errors import ConcurrentUpdateError, ManifestError, NotConnectedError, WeightSyncError
from torchrl_ext.data.transports.standalone import StandaloneTransport
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.testing import WAIT_S, TransportContract, assert_held, every_bit
from torchrl_ext.testing.interrupted import Interrupted


@dataclass
class Ends:
    """A trainer end and a worker end; ``in_group`` if they first have to form a group, as others do on first use."""

    trainer: StandaloneTransport
    worker: StandaloneTransport
    in_group: bool = field(default=False, kw_only=True)
    _connected: bool = field(default=False, init=False)

    def connect(self, weights):
        """Connect both ends at the same time, without an engine, for the parameters of ``weights``."""
        metadata = {meta.name: (meta.dtype, meta.shape) for meta in as_source(weights).params()}
        with ThreadPoolExecutor(2) as pool:
            for end in [pool.submit(side.init_all_workers_group, metadata) for side in (self.trainer, self.worker)]:
                end.result(WAIT_S)
        self._connected = True

    def exchange(self, *sent, **receive):
        """Call `send_weights(*sent)` while a thread calls `receive_weights(**receive)`; return the received weights."""
        if self.in_group and not self._connected:
            self.connect(sent[-1])
        with ThreadPoolExecutor(1) as pool:
            arriving = pool.submit(self.worker.receive_weights, WAIT_S, **receive)
            try:
                self.trainer.send_weights(*sent)
            except WeightSyncError:
                arriving.result(WAIT_S)  # the worker's own error is the cause and says more
                raise
            except BaseException:
                self.worker.abort()  # nothing will come: let the worker's thread end
                raise
            received = arriving.result(WAIT_S)
        assert received is not None, "nothing arrived"
        return received


def assert_arrived(received, weights):
    """Assert that ``received`` is a flat TensorDict with exactly the tensors of ``weights``, bit for bit."""
    assert isinstance(received, TensorDict)
    assert set(received.keys()) == set(dict(as_source(weights)))
    assert_held(received, weights)


class StandaloneContract(TransportContract):
    """Tests for transports that also work without a control layer; define `make_ends` as well."""

    @abstractmethod
    def make_ends(self, tmp_path):
        """Make two unconnected ends that can find each other; buckets or shards, if any, hold `SMALL_BYTES`."""

    @pytest.fixture
    def ends(self, tmp_path):
        """Yield two ends; shut them down afterwards."""
        ends = self.make_ends(tmp_path)
        yield ends
        ends.worker.shutdown()
        ends.trainer.shutdown()

    def test_every_bit_arrives(self, ends):
        weights = every_bit()
        assert_arrived(ends.exchange(weights), weights)

    def test_given_tensors_are_filled_in_place(self, ends):
        sent = TensorDict({"a": {"b": torch.randn(40, 50), "c": torch.randn(3)}}, [])
        held = TensorDict({"a": {"b": torch.zeros(50, 40).t(), "c": torch.zeros(3)}}, [])
        before = {name: tensor.data_ptr() for name, tensor in as_source(held)}
        assert_arrived(ends.exchange("policy", sent, weights=held), sent)
        assert_held(held, sent)
        assert before == {name: tensor.data_ptr() for name, tensor in as_source(held)}

    def test_later_versions_leave_received_ones_as_they_were(self, ends):
        """Nothing new is None within the timeout; a later version changes no tensor of an earlier one."""
        weights = {"a": torch.zeros(700), "b": torch.zeros(5, dtype=torch.bfloat16)}
        ends.connect(weights)
        assert ends.worker.receive_weights(0.05) is None
        seen = []
        for step in range(4):
            for tensor in weights.values():
                tensor.fill_(step)
            seen.append(ends.exchange("policy", weights))
        assert ends.worker.receive_weights(0.05) is ends.worker.receive_weights(0.0) is None
        for step, received in enumerate(seen):
            assert all(bool((received[name] == step).all()) for name in weights)
        assert ends.worker.received_version == 4
        assert ends.trainer.latest_version() == 4

    def test_concurrent_second_send_is_refused(self, ends):
        """A send during another one is refused, and the first one arrives."""
        inside, go_on = threading.Event(), threading.Event()
        weights = {"x": torch.randn(5), "y": torch.randn(5)}

        def wait():
            inside.set()
            assert go_on.wait(WAIT_S)

        ends.connect(weights)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(ends.exchange, "policy", Interrupted(weights, wait))
            assert inside.wait(WAIT_S)
            with pytest.raises(ConcurrentUpdateError, match="the running send continues"):
                ends.trainer.send_weights("policy", weights)
            go_on.set()
            assert_arrived(first.result(WAIT_S), weights)

    @pytest.mark.parametrize(
        ("named", "tensor"),
        [
            ("b.c", None),  # the receiver does not know it
            ("omega", torch.zeros(1)),  # the update lacks it
            ("b.c", torch.zeros(1, 2)),
            ("alpha", torch.zeros(3, dtype=torch.bfloat16)),
        ],
        ids=["unknown", "missing", "shape", "dtype"],
    )
    def test_parameter_that_cannot_land_changes_nothing(self, ends, named, tensor):
        """The error names the parameter that cannot land, and no tensor changes."""
        wanted = {"alpha": torch.zeros(3), "b.c": torch.zeros(2), named: tensor}
        held = {name: one for name, one in wanted.items() if one is not None}
        with pytest.raises(ManifestError, match=named):
            ends.exchange("policy", {"alpha": torch.ones(3), "b": {"c": torch.ones(2)}}, weights=held)
        assert not any(one.any() for one in held.values())

    def test_a_bare_send_connects_until_the_shutdown(self, ends):
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
