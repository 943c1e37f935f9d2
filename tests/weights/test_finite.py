"""A NaN or an infinity in the weights: who is warned, when an update is refused, and what the report says."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import torchrl_ext as tx
from torchrl_ext.errors import ConfigError, ManifestError, UpdateError
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.sync.update_source import UpdateSource
from torchrl_ext.weights import finite
from torchrl_ext.weights.finite import FiniteCheck, nought_of
from torchrl_ext.weights.shards.blocks import Block, Shard
from torchrl_ext.weights.source import MappingSource, ModuleSource, WeightSource, checked

ROUTES = {
    "memory": {},
    "disk": {"root": "disk"},
    "delta": {"root": "delta"},
    "collective": {"backend": "gloo", "device": "cpu", "timeout_s": 20.0},
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2]


class Gathered(WeightSource):
    """Weights that exist only as they pass, as those of a sharded trainer."""

    def __init__(self, model):
        self._own = ModuleSource(model)

    def params(self):
        return self._own.params()

    def __iter__(self):
        return iter(self._own)


class Watched(InProcessEngine):
    """Notes its pauses."""

    paused = 0

    def begin(self, version):
        self.paused += 1
        super().begin(version)


@pytest.fixture(params=ROUTES)
def transport(request, tmp_path):
    settings = dict(ROUTES[request.param])
    if "root" in settings:
        settings["root"] = tmp_path / settings["root"]
    transport = tx.make_transport(request.param, **settings)
    yield transport
    transport.shutdown()


def spoilt(value=float("nan"), also=()):
    policy = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    with torch.no_grad():
        for name in ("1.weight", *also):
            policy.get_parameter(name).view(-1)[-1] = value
    return policy


def warnings_of(caplog):
    return [row.getMessage() for row in caplog.records if "infinity" in row.getMessage()]


@pytest.mark.parametrize("gathered", [False, True])
def test_by_default_one_warning_names_the_first_tensor_and_the_update_goes_on(transport, gathered, caplog):
    served, policy = spoilt(0.0), spoilt(also=["1.bias"])
    sender = tx.WeightSender(transport, InProcessEngine(served))
    with caplog.at_level(logging.WARNING, "torchrl_ext"):
        report = sender.update_weights(Gathered(policy) if gathered else policy)
    (line,) = warnings_of(caplog)
    assert "version 1" in line
    assert "'1.weight', the first of 2 " in line
    assert report.finite is False
    assert report.verified
    assert served[1].weight.isnan().sum() == 1


@pytest.mark.parametrize("gathered", [False, True])
def test_a_refusal_leaves_the_engine_as_it_is(transport, gathered, caplog):
    served, policy = spoilt(0.0), spoilt(float("-inf"))
    engine = Watched(served)
    sender = tx.WeightSender(transport, engine, finite="refuse")
    with pytest.raises(UpdateError if gathered else ManifestError, match=r"infinity in '1\.weight'"):
        sender.update_weights(Gathered(policy) if gathered else policy)
    assert not warnings_of(caplog) and served[1].weight.isfinite().all()
    if gathered:
        assert engine.paused == (transport.name == "collective")  # the others make their pass before the pause
    else:
        assert engine.paused == 0 and transport.latest_version() == 0
    assert sender.update_weights(spoilt(2.0)).finite is True
    assert served[1].weight.view(-1)[-1] == 2.0
    assert sender.update_weights(spoilt(), only="0").part  # tensors that are not sent may be anything


@pytest.mark.parametrize("settings", [{"encoding": "dense"}, {"encoding": "xor"}, {"by_shard": True}, {}], ids=str)
@pytest.mark.parametrize("gathered", [False, True])
def test_a_delta_is_looked_at_where_it_changed_until_something_is_not_finite(tmp_path, settings, gathered, monkeypatch):
    policy, whole = spoilt(0.0), []
    monkeypatch.setattr(finite, "nought_of", lambda tensor: whole.append(tensor.numel()) or nought_of(tensor))
    transport = tx.DeltaTransport(tmp_path / "root", **settings)
    sender = tx.WeightSender(transport, InProcessEngine(spoilt(0.0)))

    def updated(value):
        whole.clear()
        policy[1].weight.data[0, 0] = value
        return sender.update_weights(Gathered(policy) if gathered else policy).finite, sum(whole)

    assert updated(0.0) == (True, 59 if "by_shard" in settings else 0)  # of finite copies, runs are looked at
    known = 20 if settings == {"encoding": "xor"} else 0  # of tensors in another library's files all is looked at
    assert updated(2.0) == (True, known)
    assert updated(float("inf")) == (False, 20)
    assert updated(float("inf")) == (False, 20)  # as it was
    assert updated(3.0) == (True, 20)
    assert updated(4.0) == (True, known)
    transport.shutdown()


def test_a_base_checkpoint_is_looked_at_also_after_a_sender_that_did_not_look(tmp_path):
    policy = spoilt()
    save_file({name: tensor.clone() for name, tensor in ModuleSource(policy)}, tmp_path / "model.safetensors")
    transport = tx.DeltaTransport(tmp_path / "root", base=tmp_path)
    for policy_of_sender, expected in (("warn", False), ("send", None), ("warn", False)):
        sender = tx.WeightSender(transport, InProcessEngine(policy), finite=policy_of_sender)
        report = sender.update_weights(policy)
        assert report.finite is report.to_json()["finite"] is expected and report.density == 0.0
    transport.shutdown()
    with pytest.raises(ConfigError, match="finite cannot be 'raise'"):
        tx.WeightSender(tx.MemoryTransport(), finite="raise")


class Halves(MappingSource):
    """Holds one tensor, of four elements, as two blocks."""

    def shards(self):
        ((meta, tensor),) = checked(self)
        for half in (slice(0, 2), slice(2, 4)):
            yield Shard(meta, Block((half.start,), (half.stop,)), lambda half=half: tensor[half])


def test_blocks_are_looked_at_where_they_are_taken():
    source = Halves({"weight": torch.tensor([0.0, 1.0, 2.0, float("nan")])})
    first, second = UpdateSource(source, finite=FiniteCheck("refuse")).shards()
    first.take()
    with pytest.raises(ManifestError, match="'weight'"):
        second.take()


def test_blocks_are_looked_at_as_they_are_cast():
    large = torch.tensor([0.0, 1.0, 2.0, 1e6])
    first, second = UpdateSource(Halves({"weight": large}), dtype=torch.float16, finite=FiniteCheck("refuse")).shards()
    first.take()
    with pytest.raises(ManifestError, match="'weight'"):
        second.take()
    check = FiniteCheck("warn")
    assert [shard.take().dtype for shard in UpdateSource(Halves({"weight": large}), finite=check).shards()]
    assert check.finite is True


def test_only_values_that_are_not_finite_are_found():
    for dtype, shape in itertools.product(DTYPES, [(), (1,), (7, 11), (0, 3)]):
        most = torch.finfo(dtype).max
        for value in (most, -most, torch.nan, torch.inf, -torch.inf):
            tensor = torch.full(shape, most, dtype=dtype)  # whose sum is infinite
            if tensor.numel():
                tensor.view(-1)[-1] = value
            check = FiniteCheck("warn")
            check.look("w", tensor.mT if tensor.ndim > 1 else tensor)
            assert check.finite is (not tensor.numel() or abs(value) == most), (dtype, shape, value)
    check = FiniteCheck("warn")
    check.look("integers", torch.full((3,), 7))
    check.look("fp8", torch.full((3,), 448.0).to(torch.float8_e4m3fn))
    check.look("fp4", torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    assert check.finite is True
