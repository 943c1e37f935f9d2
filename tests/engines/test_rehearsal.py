"""A rehearsal shows, before the first update, whether a second load leads to where a cold start does."""

import functools
import logging
import threading
import types
import weakref
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchrl_ext as tx
from tests.engines.processed import PROBE, Absorbed, Model, ProcessedModel, Sabotage, checkpoint, outputs, processed
from torchrl_ext.base.errors import WeightSyncError
from torchrl_ext.data.deltas.bits import flat_bits
from torchrl_ext.engines import runtime
from torchrl_ext.engines.loader import EngineLoader
from torchrl_ext.engines.rehearsal import changed, chosen_positions
from torchrl_ext.engines.runtime import reachable
from torchrl_ext.sync.local.inprocess import InProcessEngine
from torchrl_ext.sync.receiver import WeightReceiver


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("start")


def sending(loader, transport=None, **settings):
    engine = InProcessEngine(WeightReceiver(loader))
    return tx.WeightSender(transport or tx.make_transport("memory"), engine, **settings), engine


def holds(loader, seed):
    return torch.equal(loader.model.module(PROBE), outputs(checkpoint(seed)))


def verdicts(engine):
    (told,) = engine.rehearsed
    return {row["kernel"]: row["verdict"] for row in told["layers"]}


def followed(loader, transport=None, seeds=(1, 2)):
    """What the rehearsal said of an engine that follows a trainer."""
    sender, engine = sending(loader, transport)
    for seed in seeds:
        report = sender.update_weights(checkpoint(seed))
        assert report.verified and report.proof == report.engines[0].proof == "rehearsed" and holds(loader, seed)
    assert report.spans.get("rehearse", 0) < report.spans["total"]
    return engine.rehearsed[0] | verdicts(engine)


def test_rehearsal_separates_in_place_layers_from_reloaded(folder):
    found = followed(processed(folder))
    assert found["Fused"] == found["Model"] == "in place"
    assert found["Shuffled"] == found["Packed"] == found["Absorbed"] == "by reload"


@pytest.mark.parametrize("kind", ["Shuffled", "Packed", "Absorbed"])
def test_layer_that_a_reload_leaves_out_is_refused_by_name(folder, kind):
    loader = processed(folder, lacks=[kind])
    sender, engine = sending(loader)
    with pytest.raises(WeightSyncError, match=f"blocks.0.{kind}") as told:
        sender.update_weights(checkpoint(1))
    assert not told.value.report.verified and told.value.report.proof == "sent"
    comes_back = kind == "Absorbed"  # the others' own reload leads nowhere, not even back
    assert engine.look()[0].state == ("serving" if comes_back else "paused")
    assert holds(loader, 0) or not comes_back
    if not comes_back:
        never = tx.WeightSender(tx.make_transport("memory"), engine, rehearse="never")
        with pytest.raises(WeightSyncError, match="start the engine again"):
            never.update_weights(checkpoint(1))
        assert engine.look()[0].state == "paused"


@pytest.mark.parametrize("kind", ["Shuffled", "Packed", "Absorbed"])
def test_a_repair_that_is_known_mends_it_and_is_named(folder, kind):
    found = followed(processed(folder, lacks=[kind], knows=[kind]))
    assert found[kind] == "repaired" and found["repairs"] == [f"{kind}.process"]


def test_patchable_parameters_are_decided_by_bytes_not_shape(folder, tmp_path):
    loader = processed(folder)
    followed(loader, tx.DeltaTransport(tmp_path), (1, 2, 3))
    assert loader.patchable("blocks.0.Fused.q") and not loader.patchable("blocks.0.Shuffled.experts.0")


def test_derived_copy_makes_a_delta_reload_the_whole_model(folder, tmp_path):
    loader = processed(folder, careless=True)
    found = followed(loader, tx.DeltaTransport(tmp_path), (1, 2, 3))
    assert found["changes"] == "by reload" and not loader.patchable("blocks.0.Fused.q")


def test_opaque_loader_is_reloaded_and_stale_weight_refused(folder, monkeypatch):
    found = followed(processed(folder, opaque=True))
    assert {row["verdict"] for row in found["layers"]} == {"by reload"}
    sender, _ = sending(processed(folder, opaque=True))
    monkeypatch.setattr(Model, "load_weights", lambda model, pairs: list(pairs))
    with pytest.raises(WeightSyncError, match="weight is computed with, and no load changes it"):
        sender.update_weights(checkpoint(1))


def test_never_proves_what_was_sent_and_no_more(folder):
    loader = processed(folder, lacks=["Absorbed"])
    sender, _ = sending(loader, rehearse="never")
    report = sender.update_weights(checkpoint(1))
    assert (report.verified, report.proof) == (False, "sent") and not holds(loader, 1)


def test_a_second_connection_need_not_rehearse(folder):
    loader = processed(folder)
    _, engine = sending(loader)
    rehearsals, rehearse = [], loader.rehearse
    loader.rehearse = lambda: rehearsals.append(1) or rehearse()
    for _ in range(2):
        sender = tx.WeightSender(tx.make_transport("memory"), engine)
        sender.init_all_workers_group({name: (t.dtype, t.shape) for name, t in checkpoint(0).items()})
    assert sender.update_weights(checkpoint(1)).verified and holds(loader, 1) and len(rehearsals) == 1


def test_no_saboteur_ends_verified(folder, tmp_path):
    """100 loaders, each wrong about one tensor in one way."""
    caught = {way: 0 for way in Sabotage.WAYS}
    for seed in range(100):
        sabotage = Sabotage(seed)
        loader = processed(folder, sabotage=sabotage)
        by_delta = sabotage.way == "misplace" or seed % 5 == 0
        transport = tx.make_transport("delta", root=tmp_path / str(seed)) if by_delta else None
        sender, engine = sending(loader, transport)
        for version in (1, 2):
            try:
                report = sender.update_weights(checkpoint(version))
            except WeightSyncError:
                caught[sabotage.way] += 1
                break
            assert holds(loader, version) or not report.verified, (seed, sabotage.way, sabotage.name)
            caught[sabotage.way] += engine.rehearsed[0]["changes"] == "by reload"  # and lands as a whole from there on
        sender.shutdown()
    assert sum(min(1, count) for count in caught.values()) == len(Sabotage.WAYS), caught


class Slotted:
    __slots__ = ("__packed",)

    def __init__(self, packed):
        self.__packed = packed

    def get(self):
        return self.__packed


def buried(tensor):
    for _ in range(2000):
        tensor = [tensor]
    return Slotted([()] * 5000 + tensor)


def dig(found):
    while not isinstance(found, torch.Tensor):
        found = found.get() if isinstance(found, Slotted) else found[-1]
    return found


@pytest.mark.parametrize("bound", [None, 7100, 5000])
def test_engine_with_hidden_stale_tensor_is_never_verified(folder, bound, monkeypatch):
    monkeypatch.setattr(Absorbed, "process", lambda layer: setattr(layer, "config", buried(0.25 * layer.weight.data.T)))
    monkeypatch.setattr(Absorbed, "forward", lambda layer, x: x @ dig(layer.config))
    monkeypatch.setattr(runtime, "OBJECTS", bound or runtime.OBJECTS)
    sound, stale = processed(folder), processed(folder, lacks=["Absorbed"])
    proofs = [sending(sound)[0].update_weights(checkpoint(1)).proof]
    sender, engine = sending(stale)
    if bound != 5000:  # it is seen
        with pytest.raises(WeightSyncError, match=r"blocks.0.Absorbed.*no load changes it"):
            sender.update_weights(checkpoint(1))
        assert proofs == ["rehearsed"]
        return
    report = sender.update_weights(checkpoint(1))
    assert not report.verified and not holds(stale, 1) and [*proofs, report.proof] == ["sent", "sent"]
    assert verdicts(engine)["Absorbed"] == "unproven" and verdicts(engine)["Packed"] == "by reload"


def dress(model):
    """Keep in a model what engines keep in theirs beside weights, and what leads from each layer to all others."""

    def compiled(forward):
        backend.graphs[len(backend.graphs)] = [forward, backend]
        return functools.wraps(forward)(lambda *args: (backend, forward(*args)))

    config = SimpleNamespace(log=logging.getLogger(), lock=threading.Lock(), vocabulary={"a": 1}, group=Slotted(None))
    config.owner, config.model, config.gone = config, weakref.proxy(model), weakref.proxy(nn.Identity())
    config.compilation = SimpleNamespace(static_forward_context=dict(model.named_modules()), passes=[compiled] * 40)
    backend = SimpleNamespace(config=config, graphs={}, outputs={(8, True): torch.rand(8, 8)}, dtype=torch.bfloat16)
    for path, module in model.named_modules():
        module.vllm_config, module.prefix, module.kv_cache = config, path, [torch.rand(8, 8)]
        module.impl = SimpleNamespace(layer=module, config=config, input_buffers=[torch.rand(8, 8)], scale=0.5)
        module.quant_method = SimpleNamespace(apply=functools.partial(module.forward), moe_config=[config])
        module.weight_loader, module.forward_context = compiled(module.forward), [torch.rand(8, 8)]
    return model


def test_engine_buffers_beside_weights_leave_no_layer_unproven(folder):
    loader = processed(folder)
    bare = {reading.key for reading in reachable(loader.model.module)}
    seen = [reading for reading in reachable(dress(loader.model.module))]
    assert {reading.key for reading in seen} == bare | {
        f"{path}.impl.input_buffers.0".strip(".") for path, _ in loader.model.module.named_modules()
    }
    found = followed(loader)
    assert {"unproven", "refused"}.isdisjoint(row["verdict"] for row in found["layers"])


def closed_over(tensor):
    def unfilled():
        return late

    if tensor is None:
        late = tensor
    return lambda: (unfilled, tensor)


def with_attribute(tensor):
    def multiply():
        return multiply.packed

    multiply.packed = tensor
    return multiply


def unregistered(tensor):
    layer = nn.Linear(1, 1)
    layer.buried = tensor
    return [layer]


FOLLOWED = {
    "list": lambda tensor: [tensor],
    "dict": lambda tensor: {"a": {1: tensor}, (1, 2): 3},
    "deque": lambda tensor: deque([tensor]),
    "set": lambda tensor: {tensor},
    "partial": lambda tensor: functools.partial(torch.mul, tensor),
    "partial by name": lambda tensor: functools.partial(torch.mul, other=tensor),
    "bound method": lambda tensor: Slotted(tensor).get,
    "function of a bound method": lambda tensor: types.MethodType(lambda layer: tensor, 1),
    "unfilled slot": lambda tensor: [Slotted.__new__(Slotted), tensor],
    "closure": closed_over,
    "default": lambda tensor: lambda x=tensor: x,
    "default by name": lambda tensor: lambda *, x=tensor: x,
    "attribute of a function": with_attribute,
    "unregistered module": unregistered,
}


@pytest.mark.parametrize("kind", FOLLOWED)
def test_a_tensor_is_found_whatever_keeps_it(kind):
    model, tensor = nn.Linear(2, 2), torch.rand(3)
    model.kernel, model.empty, model.address = FOLLOWED[kind](tensor), torch.empty(0), [torch.tensor(7)]
    found = [reading for reading in reachable(model) if reading.tensor is tensor]
    assert len(found) == 1 and found[0].derived and found[0].key.startswith("kernel.")


def test_unloaded_tensor_passes_unless_it_is_a_copy(folder):
    loader = processed(folder)
    module = loader.model.module
    module.scale, module.flags = torch.rand(32), torch.ones(32)
    module.register_buffer("offsets", torch.rand(32))
    followed(loader)
    loader = processed(folder)
    loader.model.module.blocks[0]["Fused"].q_cache = torch.cat([checkpoint(0)["blocks.0.Fused.q"].T, torch.zeros(1, 8)])
    sender, _ = sending(loader)
    with pytest.raises(WeightSyncError, match=r"q_cache is a copy of blocks.0.Fused.q"):
        sender.update_weights(checkpoint(1))


def test_tensors_without_data_and_request_state_are_left_out():
    model = nn.Linear(2, 2)
    model.register_buffer("kv_cache", torch.rand(64))
    model.kv_caches, model.kv_cache_scale, model.none = [torch.rand(64)], torch.rand(64), torch.empty(0, 2)
    model.again, model.cycle, model.meta = [model.weight], [[]], torch.rand(2, device="meta")
    model.cycle[0].append(model.cycle)
    assert {reading.name for reading in reachable(model)} == {"weight", "bias", "kv_cache_scale"}


def test_a_tensor_belongs_to_the_nearest_module_that_keeps_it():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    model[1].kernel = [torch.rand(8)]
    model.every = [[model[1].kernel]]
    assert [reading.key for reading in reachable(model)] == ["1.kernel.0"]


def test_dummy_model_with_complex_parameter_is_rehearsed():
    def made_up(tensor):
        numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        numbers.uniform_(0.5, 1, generator=torch.Generator().manual_seed(1234))

    def complex_norm(seed):
        return checkpoint(seed) | {"norm": torch.polar(torch.ones(8), checkpoint(seed)["norm"])}

    loader = EngineLoader(ProcessedModel(Model(torch.complex64), dummy=made_up))
    for parameter in loader.model.module.parameters():
        made_up(parameter)
    loader.model.close([layer for _, layer in loader.model.module.layers()])
    sender, engine = sending(loader)
    assert sender.update_weights(complex_norm(1)).proof == "rehearsed"
    assert (
        torch.equal(loader.model.module(PROBE), outputs(complex_norm(1))) and verdicts(engine)["Model"] == "by reload"
    )


@given(
    dtype=st.sampled_from(
        [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int8, torch.int64]
    ),
    count=st.integers(1, 40_000),
    zero=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_changed_weights_differ_only_at_chosen_positions(dtype, count, zero):
    tensor = (torch.zeros(count) if zero else torch.rand(count) + 1).to(dtype)
    where, after = chosen_positions("w", tensor), changed("w", tensor)
    assert torch.equal((flat_bits(after) != flat_bits(tensor)).reshape(count, -1).any(1).nonzero().reshape(-1), where)
    assert where.numel() or (count < 32 and dtype in (torch.int8, torch.int64))
