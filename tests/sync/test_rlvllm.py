"""TorchRL's `RLvLLMEngine` as an engine of ours: every transport feeds it by the methods of that interface."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torchrl.modules.llm.backends.vllm import LocalLLMWrapper, RLvLLMEngine

import torchrl_ext as tx
from tests.sync.vllm_objects import LLM, says
from tests.sync.vllm_objects import net as talker
from torchrl_ext.collectors.from_torchrl_ends import as_engine
from torchrl_ext.errors import ConfigError, DeadlineError, NotConnectedError, UpdateError
from torchrl_ext.messages import TAKE_OVER
from torchrl_ext.sync.engines import actors
from torchrl_ext.sync.engines.rlvllm import RLvLLMClient
from torchrl_ext.waiting import wait_until
from torchrl_ext.weights.digests import tensor_digest


class ModuleEngine(RLvLLMEngine):
    """Implements TorchRL's interface over a module of this process."""

    def __init__(self, model):
        self.model = model
        self.groups = self.resets = 0

    def get_tp_size(self):
        return 1

    def get_model_metadata(self):
        return {name: (tensor.dtype, tensor.shape) for name, tensor in self.model.state_dict().items()}

    def get_master_address(self):
        return "localhost"

    def get_master_port(self):
        return 0

    def init_weight_update_group(self):
        self.groups += 1

    def update_weights(self, weights):
        held = self.model.state_dict()
        for name, tensor in weights:
            held[name].copy_(tensor)

    def reset_prefix_cache(self):
        self.resets += 1


class FullEngine(ModuleEngine):
    def update_weights(self, weights):
        next(weights)
        raise OSError("no memory left in the engine")


class FrozenEngine(ModuleEngine):
    def __init__(self, model):
        super().__init__(model)
        self.thawed = threading.Event()

    def update_weights(self, weights):
        self.thawed.wait()


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def sender_to(engine, name, tmp_path, policy):
    settings = {"root": tmp_path} if name in ("disk", "delta") else {}
    sender = tx.WeightSender(tx.make_transport(name, **settings), engine)
    sender.register_model(policy)
    return sender


@pytest.mark.parametrize("transport", sorted(tx.transports()))
def test_every_transport_feeds_it(transport, tmp_path):
    engine, policy = ModuleEngine(net(0)), net(1)
    sender = sender_to(tx.make_engine("ray", engine=engine), transport, tmp_path, policy)
    for version in (1, 2):
        report = sender.update_weights()
        assert (report.version, report.engines[0].state) == (version, "serving")
        for name, tensor in policy.state_dict().items():
            assert torch.equal(engine.model.state_dict()[name], tensor)
        assert (engine.groups, engine.resets) == (1, version)
        with torch.no_grad():
            policy[0].weight.add_(1)
    sender.shutdown()


@pytest.mark.parametrize(("transport", "verify"), [("disk", True), ("disk", False), ("delta", True)])
def test_tensors_are_summed_in_the_pause_only_where_somebody_compares(tmp_path, monkeypatch, transport, verify):
    summed = []
    monkeypatch.setattr(
        "torchrl_ext.sync.engines.rlvllm.tensor_digest",
        lambda tensor: (summed.append(tensor), tensor_digest(tensor))[1],
    )
    engine, policy = RLvLLMClient(ModuleEngine(net(0))), net(1)
    sender = tx.WeightSender(tx.make_transport(transport, root=tmp_path), engine, verify=verify)
    sender.update_weights(policy)
    assert len(summed) == (len(policy.state_dict()) if verify and transport == "disk" else 0)
    sender.shutdown()


def test_deadlines_reach_every_kind_of_engine_behind_the_name_ray():
    engine, policy = FrozenEngine(net(0)), net(1)
    for settings in ({"timeout_s": 0.3}, {"timeout_s": 50.0, "load_timeout_s": 0.3, "start_timeout_s": 70.0}):
        sender = sender_to(tx.make_engine("ray", engine=engine, **settings), "memory", None, policy)
        with pytest.raises(UpdateError, match=r"did not take weights within 0\.3 s"):
            sender.update_weights()
    engine.thawed.set()
    with pytest.raises(ConfigError, match="pause_mode"):
        tx.make_engine("ray", engine=engine, pause_mode="keep")


def test_a_sender_takes_it_as_vllm_engine(tmp_path):
    assert isinstance(as_engine(ModuleEngine(net(0))), RLvLLMClient)


def test_an_engine_with_other_parameters_is_refused_before_it_is_touched(tmp_path):
    engine, policy = ModuleEngine(net(0)), nn.Sequential(nn.Linear(4, 9))
    with pytest.raises(UpdateError, match=r"0\.weight"):
        sender_to(tx.make_engine("ray", engine=engine), "memory", tmp_path, policy).update_weights()
    assert engine.groups == 0


def test_what_the_engine_raises_is_in_the_error(tmp_path):
    sender = sender_to(RLvLLMClient(FullEngine(net(0))), "memory", tmp_path, policy := net(1))
    with pytest.raises(UpdateError, match=r"FullEngine.* did not take weights: OSError: no memory left"):
        sender.update_weights()
    assert policy is not None


def test_an_engine_that_hangs_is_named_at_the_deadline(tmp_path):
    engine, policy = FrozenEngine(net(0)), net(1)
    sender = sender_to(RLvLLMClient(engine, timeout_s=0.5), "memory", tmp_path, policy)
    try:
        with pytest.raises(UpdateError, match=r"FrozenEngine.* did not take weights within 0.5 s") as failure:
            sender.update_weights()
        assert isinstance(failure.value.__cause__, DeadlineError)
    finally:
        engine.thawed.set()


@pytest.mark.parametrize(
    ("transport", "backend"), [("collective", None), ("delta", "nccl"), ("disk", "torchrl_ext"), ("ipc", "nccl")]
)
def test_an_llm_in_torchrls_wrapper_says_what_the_trainer_says(transport, backend, tmp_path):
    llm = LLM(talker(0), backend)
    if backend == "torchrl_ext":
        llm.worker.call(TAKE_OVER)
    sender = sender_to(as_engine(LocalLLMWrapper(llm, 1, "net")), transport, tmp_path, policy := talker(1))
    try:
        for version in (1, 2):
            policy.load_state_dict(talker(version).state_dict())
            assert says(llm.model, 3, 8) != says(policy, 3, 8)
            report = sender.update_weights()
            assert (report.version, report.verified, llm.version) == (version, True, str(version))
            assert says(llm.model, 3, 8) == says(policy, 3, 8) and llm.dropped == version
    finally:
        sender.shutdown()
    assert llm.worker.backends == [backend, "torchrl_ext"]  # and was asked for once


def test_an_engine_whose_environment_lacks_our_plugin_says_what_is_missing(tmp_path):
    llm, policy = LLM(talker(0), "nccl", plugin=False), talker(1)
    for name in ("ray", "inprocess"):
        engine = tx.make_engine(name, engine=LocalLLMWrapper(llm, 1, "net"))
        with pytest.raises(UpdateError, match=r"torchrl_ext_backend.*install this package beside vLLM.*VLLM_PLUGINS"):
            sender_to(engine, "disk", tmp_path / name, policy).update_weights()
    assert says(llm.model, 3, 8) == says(talker(0), 3, 8)


class Serving:
    """Of an actor that goes on with other calls while one of ours runs."""

    def __init__(self):
        self.model = net(0)

    async def generate(self): ...


def test_what_a_client_gave_up_asking_for_is_dropped_when_it_closes_and_what_others_ask_for_is_not():
    held = Serving()

    def begun(client, job, method):
        assert actors.begin(held, lambda held: held.model, client, job, method) is None
        wait_until(actors._jobs[client][job].done, 60, lambda: AssertionError("it does not end"))

    begun("left", "late", "info")
    begun("stays", "other", "info")
    begun("left", "last", "close")
    assert actors.answer(held, "left", "last") == (None,)
    assert actors._jobs.keys() == actors._hosted.keys() == {"stays"}
    with pytest.raises(NotConnectedError, match="left the engine"):
        actors.answer(held, "left", "late")
    (info,) = actors.answer(held, "stays", "other")
    assert info.world_size == 1 and not actors._jobs
    begun("stays", "last", "close")
    assert actors.answer(held, "stays", "last") == (None,) and not actors._hosted
