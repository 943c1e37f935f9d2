"""A worker of a sharded model needs some blocks of each tensor, and lands them as it would land whole tensors."""

import copy
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import torchrl_ext as tx
from torchrl_ext.errors import IntegrityError, ManifestError
from torchrl_ext.landing.placement import record
from torchrl_ext.landing.sliced import Sliced, part_of
from torchrl_ext.plugins.loader import PluginLoader
from torchrl_ext.plugins.slices import apart, merged
from torchrl_ext.proof.runtime import reachable
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.transports.base import WorkerEnd
from torchrl_ext.weights.digests import tensor_digest
from torchrl_ext.weights.shards.blocks import Block
from torchrl_ext.weights.source import as_source

RANKS, HIDDEN, VOCAB, EXPERTS, INNER = 2, 8, 10, 4, 6
SHAPES = {
    "embed": (VOCAB, HIDDEN),
    "q": (8, HIDDEN),
    "k": (4, HIDDEN),
    "v": (4, HIDDEN),
    "down": (HIDDEN, 12),
    "gate_up": (EXPERTS, 2 * INNER, HIDDEN),
    "experts.0.w": (INNER, HIDDEN),
    "experts.1.w": (INNER, HIDDEN),
    "experts.2.w": (INNER, HIDDEN),
    "experts.3.w": (INNER, HIDDEN),
    "turned": (12, HIDDEN),
    "twice": (HIDDEN,),
    "decay": (HIDDEN,),
    "corner": (HIDDEN, HIDDEN),
    "heads": (4 * 3 * 2, HIDDEN),
    "norm": (HIDDEN,),
    "scale": (),
}


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(shape, generator=generator) + 0.5 for name, shape in SHAPES.items()}


class Layer(nn.Module):
    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape), requires_grad=False))


class Model(nn.Module):
    """A rank's part of a model: fused, stacked, padded, transposed and packed weights, as engines have them."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.embed = Layer(weight=(8, HIDDEN))  # five rows, and padding
        self.qkv = Layer(weight=(4 + 4 + 4, HIDDEN))  # its own heads of q; one head of k and v for all ranks
        self.down = Layer(weight=(HIDDEN, 6))
        self.stacked = Layer(weight=(EXPERTS // RANKS, 2 * INNER, HIDDEN))
        self.experts = Layer(weight=(EXPERTS // RANKS, INNER, HIDDEN))
        self.turned = Layer(weight=(HIDDEN, 6))
        self.twice = Layer(first=(HIDDEN,), second=(HIDDEN,))
        self.mixer = Layer(decay=(HIDDEN,), corner=(HIDDEN,))
        self.heads = Layer(weight=(3, 2 * 2, HIDDEN))  # q, k and v lie head by head in the checkpoint, and apart here
        self.norm = Layer(weight=(HIDDEN,), scale=(1,))
        self.handed = []

    def load_weights(self, pairs):
        for name, tensor in pairs:
            self.handed.append(name)
            self._load(name, tensor)

    def _load(self, name, tensor):
        rank, parts = self.rank, name.split(".")
        if name == "embed":
            own = tensor.narrow(0, 5 * rank, 5)
            self.embed.weight[:5].data.copy_(own)
            self.embed.weight[5:].data.fill_(0)
        elif name in ("q", "k", "v"):
            first = {"q": 0, "k": 4, "v": 8}[name]
            own = tensor.narrow(0, 4 * rank, 4) if name == "q" else tensor
            self.qkv.weight.data.narrow(0, first, 4).copy_(own)
        elif name == "down":
            self.down.weight.data.copy_(tensor.narrow(1, 6 * rank, 6))
        elif name == "gate_up":
            for index, expert in enumerate(tensor.unbind(0)):
                place = index - rank * 2
                for half, part in enumerate(expert.chunk(2, 0) if 0 <= place < 2 else ()):
                    self.stacked.weight.data[place].narrow(0, half * INNER, INNER).copy_(part)
        elif parts[0] == "experts":
            place = int(parts[1]) - rank * 2
            if 0 <= place < 2:
                self.experts.weight.data[place].copy_(tensor)
        elif name == "turned":
            self.turned.weight.data.copy_(tensor.chunk(RANKS, 0)[rank].t())
        elif name == "twice":
            self.twice.first.data.copy_(tensor)
            self.twice.second.data.copy_(tensor)
        elif name == "decay":
            self.mixer.decay.data.copy_(-torch.exp(tensor.float()))
        elif name == "corner":
            self.mixer.corner.data.copy_(tensor.diagonal())
        elif name == "heads":
            own = tensor.view(4, 3, 2, HIDDEN).chunk(RANKS, 0)[rank]
            for part in range(3):
                self.heads.weight.data[part].view(2, 2, HIDDEN).copy_(own[:, part])
        elif name == "norm":
            self.norm.weight.data.copy_(tensor)
        else:
            assert name == "scale", name
            self.norm.scale.data.copy_(tensor.reshape(1))


class Loader(PluginLoader):
    """Packs ``down`` after it was loaded; its layer has to be opened for a load, and takes nothing while it is not."""

    def __init__(self, model, checkpoint, packs=("down",)):
        super().__init__(model, str(checkpoint), None, alone=False, dtype=torch.float32, tied=False)
        self.opened, self.packs = [], packs

    def runtime(self):
        return reachable(self._model)

    def _placed(self, params):
        stand_in = copy.deepcopy(self._model).to("meta")
        stand_in.down.weight = nn.Parameter(torch.empty(HIDDEN, 6, device="meta"), requires_grad=False)
        return record(stand_in.load_weights, params, dict(stand_in.named_parameters()))

    def _is_plain(self, tensor, landing):
        return tensor is not None and tensor.numel() > 0

    def _open(self, names):
        self.opened.append(None if names is None else sorted(names))
        layers = []
        if names is None or "down" in names:
            self._model.down.weight = nn.Parameter(torch.full((HIDDEN, 6), torch.nan), requires_grad=False)
            layers.append(self._model.down)
        return layers

    def _close(self, layers):
        for layer in layers:
            pack(layer)

    def _loaded_with(self, touched):
        return [name for name in SHAPES if touched and not self.patchable(name)]

    def _made_up(self):
        return None


def pack(layer):
    layer.packed = layer.weight.data.t().contiguous() * 2
    layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def cold(rank, seed):
    """The model as a start from these weights makes it."""
    model = Model(rank)
    model.load_weights(weights(seed).items())
    pack(model.down)
    model.handed.clear()
    return model


def state(model):
    return {reading.key: reading.tensor.clone() for reading in reachable(model)}


def assert_is(model, expected):
    found, expected = state(model), state(expected)
    assert found.keys() == expected.keys()
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []


@pytest.fixture(params=range(RANKS))
def rank(request):
    return request.param


@pytest.fixture
def loader(rank, tmp_path):
    save_file(weights(0), tmp_path / "model.safetensors")
    found = Loader(cold(rank, 0), tmp_path)
    found.by_slices(True)
    found.check(as_source(weights(0)).params())
    return found


def sent(loader, seed, targets, names=SHAPES):
    """What a transport yields that fills targets where they are given."""
    for name, tensor in weights(seed).items():
        if name not in names:
            continue
        blocks = loader.slices().get(name)
        if blocks is None:
            yield name, tensor
        elif blocks:
            yield name, Sliced.cut(name, tensor, blocks, targets.get(name))


def updated(loader, seed, by_targets=True):
    loader.start()
    loader.load(sent(loader, seed, loader.targets() if by_targets else {}))
    loader.finish()


def test_each_worker_names_the_blocks_that_land_on_it(loader, rank):
    found = loader.slices()
    assert found["embed"] == (Block((5 * rank, 0), (5 * rank + 5, HIDDEN)),)
    assert found["q"] == (Block((4 * rank, 0), (4 * rank + 4, HIDDEN)),)
    assert found["k"] == found["v"] == (Block((0, 0), (4, HIDDEN)),)
    assert found["down"] == (Block((0, 6 * rank), (HIDDEN, 6 * rank + 6)),)
    assert found["gate_up"] == (Block((2 * rank, 0, 0), (2 * rank + 2, 2 * INNER, HIDDEN)),)
    held = {int(name.split(".")[1]) for name, blocks in found.items() if name.startswith("experts.") and blocks}
    assert held == {2 * rank, 2 * rank + 1}
    assert found["turned"] == (Block((6 * rank, 0), (6 * rank + 6, HIDDEN)),)
    assert found["twice"] == (Block((0,), (HIDDEN,)),) and found["scale"] == (Block((), ()),)
    assert found["heads"] == (Block((12 * rank, 0), (12 * rank + 12, HIDDEN)),)
    whole = loader.whole()
    assert whole.keys() == {"decay", "corner"} and found.keys() == SHAPES.keys() - whole.keys()
    assert "computes mixer.decay" in whole["decay"] and "far apart" in whole["corner"]


@pytest.mark.parametrize("by_targets", [True, False])
def test_slices_land_as_a_cold_start_lands_whole_tensors(loader, rank, by_targets):
    for seed in (1, 2, 0):
        updated(loader, seed, by_targets)
        assert_is(loader._model, cold(rank, seed))


def test_plain_tensors_are_received_in_live_memory_and_their_layers_are_not_opened(loader, rank):
    loader.start()
    targets = loader.targets()
    assert targets.keys() == {"embed", "q", "k", "v", "gate_up", "turned", "norm", "scale"} | {
        f"experts.{2 * rank + index}.w" for index in range(2)
    }
    live = dict(loader._model.named_parameters())
    block = Block((6 * rank, 2), (6 * rank + 6, 3))
    assert part_of(targets["turned"], block).data_ptr() == live["turned.weight"][2].data_ptr()
    assert part_of(targets["gate_up"], loader.slices()["gate_up"][0]).shape == (2, 2 * INNER, HIDDEN)
    loader.load(sent(loader, 1, targets))
    loader.finish()
    assert loader._model.handed == ["down", "decay", "corner"] and loader.opened == [["corner", "decay", "down"]]
    assert_is(loader._model, cold(rank, 1))


def test_a_tensor_that_shares_a_layer_with_one_that_is_rebuilt_goes_through_the_loader(rank, tmp_path):
    save_file(weights(0), tmp_path / "model.safetensors")
    model = cold(rank, 0)
    model.norm.scale.data.mul_(3)  # not as the loader would leave it: the engine made something else of it
    loader = Loader(model, tmp_path)
    loader.by_slices(True)
    loader.check(as_source(weights(0)).params())
    loader.start()
    assert not {"scale", "norm"} & loader.targets().keys() and {"scale", "norm"} <= set(loader.opened[-1])


def test_what_a_worker_needs_nothing_of_is_not_missing_and_all_else_is(loader, rank):
    loader.start()
    loader.load(pair for pair in sent(loader, 1, {}) if pair[0] not in ("q", "decay"))
    assert loader.missing() == ["decay", "q"]
    with pytest.raises(IntegrityError, match="2 of the parameters that were announced did not come, first 'decay'"):
        loader.finish()
    updated(loader, 2)
    assert_is(loader._model, cold(rank, 2))


def test_a_slice_too_little_is_an_error_and_no_old_weight(loader, rank):
    def lacking():
        for name, tensor in sent(loader, 1, {}):
            if name in ("q", "down"):
                (block, data), *_ = tensor.parts
                short = Block(block.start, (block.stop[0] - 1, block.stop[1]))
                tensor = Sliced.of(tensor.meta, [(short, data[:-1])])
            yield name, tensor

    for name in ("q", "down"):
        loader.start()
        with pytest.raises(IntegrityError, match=f"of tensor '{name}' did not come"):
            loader.load(pair for pair in lacking() if pair[0] == name)
    updated(loader, 2)
    assert_is(loader._model, cold(rank, 2))


def test_no_digest_is_taken_of_slices(loader, monkeypatch):
    def refuse(tensor):
        assert not isinstance(tensor, Sliced)
        return ""

    monkeypatch.setattr("torchrl_ext.plugins.loader.tensor_digest", refuse)
    loader.vouch(True)
    updated(loader, 1, by_targets=False)


def test_a_rehearsal_goes_the_way_that_updates_go(loader, rank, monkeypatch):
    seen = []
    land = Model._load
    monkeypatch.setattr(Model, "_load", lambda self, name, tensor: seen.append(tensor) or land(self, name, tensor))
    assert loader.unrehearsed()
    told = loader.rehearse()
    assert told["restored"] and loader.proof() == "rehearsed" and not loader.unrehearsed()
    assert_is(loader._model, cold(rank, 0))
    assert any(isinstance(tensor, Sliced) for tensor in seen)
    loader.by_slices(False)  # of whole tensors nothing was shown
    assert loader.proof() == "sent" and loader.unrehearsed()
    loader.rehearse()
    assert loader.proof() == "rehearsed" and loader.opened[-1] is None


def test_a_rehearsal_finds_live_memory_that_is_not_what_is_computed_with(rank, tmp_path):
    save_file(weights(0), tmp_path / "model.safetensors")
    model = cold(rank, 0)
    model.qkv.copy = model.qkv.weight.data.clone()  # what the layer multiplies with; no load brings it
    loader = Loader(model, tmp_path)
    loader.by_slices(True)
    loader.check(as_source(weights(0)).params())
    with pytest.raises(Exception, match="qkv"):
        loader.rehearse()
    assert loader.proof() == "sent"


def test_where_only_a_whole_load_rebuilds_a_derived_copy_no_slice_lands_past_the_loader(rank, tmp_path):
    def derive(model):
        model.qkv.copy = model.qkv.weight.data.clone()
        return model

    class Deriving(Loader):
        def _open(self, names):
            return [*super()._open(names), *([self._model] if names is None else [])]

        def _close(self, layers):
            for layer in layers:
                derive(layer) if layer is self._model else pack(layer)

    save_file(weights(0), tmp_path / "model.safetensors")
    loader = Deriving(derive(cold(rank, 0)), tmp_path)
    loader.by_slices(True)
    loader.check(as_source(weights(0)).params())
    assert loader._sliced().direct
    loader.rehearse()
    assert loader.proof() == "rehearsed" and not loader._sliced().direct
    updated(loader, 1)
    assert_is(loader._model, derive(cold(rank, 1)))


def test_a_transport_that_brings_slices_is_told_what_is_wanted_and_updates_go_the_way_that_was_rehearsed(
    loader, rank, monkeypatch
):
    wanted = {}

    class Cutting(WorkerEnd):
        def __init__(self, end):
            self.end = end

        def receive(self, arrival, into, within):
            for name, tensor in self.end.receive(arrival, {}, within):
                blocks = wanted["slices"].get(name)
                if blocks is None:
                    yield name, tensor
                elif blocks:
                    yield name, Sliced.cut(name, tensor, blocks, into.get(name))

        def close(self):
            self.end.close()

    def join(info, here, within):
        wanted.update(slices=dict(here.slices), whole=dict(here.whole))
        return Cutting(joined(info, here, within))

    joined = tx.MemoryTransport.join
    loader.by_slices(False)
    engine = InProcessEngine(tx.WeightReceiver(loader))
    sender = tx.WeightSender(tx.make_transport("memory"), engine)
    assert sender.update_weights(weights(0)).proof == "rehearsed" and not wanted and loader.opened[-1] is None
    loader.touched = False  # they were the weights that it was started with
    with monkeypatch.context() as patch:
        for name, value in {"slices": True, "proves": True, "join": staticmethod(join)}.items():
            patch.setattr(tx.MemoryTransport, name, value)
        sender = tx.WeightSender(tx.make_transport("memory"), engine)
        for seed in (1, 2):
            report = sender.update_weights(weights(seed))
            assert report.proof == "rehearsed" and report.verified
            assert_is(loader._model, cold(rank, seed))
    assert wanted == {"slices": loader.slices(), "whole": loader.whole()}
    assert loader.opened[-1] == ["corner", "decay", "down"]


def test_neighbours_become_one_block_and_so_does_what_overlaps():
    def box(*bounds):
        return Block(tuple(one[0] for one in bounds), tuple(one[1] for one in bounds))

    assert merged([]) == ()
    assert merged([box((0, 2), (0, 4))] * 3) == (box((0, 2), (0, 4)),)
    assert merged([box((2, 4), (0, 4)), box((0, 2), (0, 4))]) == (box((0, 4), (0, 4)),)
    assert merged([box((0, 2), (0, 4)), box((1, 2), (1, 3))]) == (box((0, 2), (0, 4)),)
    assert merged([box((0, 2), (0, 2)), box((1, 3), (1, 3))]) == (box((0, 3), (0, 3)),)
    far = (box((0, 2), (0, 4)), box((4, 6), (0, 4)))
    assert merged(reversed(far)) == far
    grid = [box((x, x + 1), (y, y + 2)) for x in range(3) for y in (0, 2, 4)]
    assert merged(grid) == (box((0, 3), (0, 6)),)
    corner = (box((0, 1), (0, 2)), box((1, 2), (0, 1)))
    assert merged(corner) == corner


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(*[st.tuples(st.integers(0, 5), st.integers(1, 3))] * 2), max_size=12))
def test_merged_blocks_have_every_element_once_and_no_two_of_them_join(sides):
    blocks = [Block(tuple(at for at, _ in own), tuple(at + size for at, size in own)) for own in sides]
    found, whole, times = merged(blocks), Block.whole((8, 8)), torch.zeros(8, 8)
    for block in found:
        times[block.within(whole)] += 1
    assert times.max() <= 1 and all((times[block.within(whole)] == 1).all() for block in blocks)
    assert merged(found) == found == merged(reversed(blocks)) and len(found) <= len(blocks)


def of(loader, seed, names, targets=None):
    """What a transport yields of a part."""
    if targets is None:
        return [(name, tensor) for name, tensor in weights(seed).items() if name in names]
    return list(sent(loader, seed, targets, names))


def mixed(rank, seed, names):
    """The model as a start from weights makes it of which these have the other seed."""
    model = Model(rank)
    model.load_weights({**weights(0), **{name: weights(seed)[name] for name in names}}.items())
    pack(model.down)
    return model


@pytest.mark.parametrize("by_slices", [False, True])
def test_a_part_lands_as_a_cold_start_lands_it_and_opens_only_layers_that_are_rebuilt(loader, rank, by_slices):
    loader.by_slices(by_slices)
    landed = set()
    for names in ({"q", "embed", "experts.1.w"}, {"v", "norm"}, {"down", "decay", "corner", "k"}):
        loader.part(frozenset(names))
        loader.start()
        loader.load(of(loader, 1, names, loader.targets() if by_slices else None))
        loader.finish()
        loader.part(None)
        landed |= names
        assert_is(loader._model, mixed(rank, 1, landed))
    assert loader.opened == [["corner", "decay", "down"]]  # corner shares its layer with decay
    assert set(loader._model.handed) == {"down", "decay", "corner"}
    loader.by_slices(False)
    loader.start()
    loader.load(weights(2).items())
    loader.finish()
    assert_is(loader._model, cold(rank, 2))


def test_a_part_without_what_its_layers_are_rebuilt_from_is_refused_by_name(loader, rank):
    before = state(loader._model)
    for by_slices in (False, True):
        loader.by_slices(by_slices)
        with pytest.raises(ManifestError, match=r"'down' the engine builds layers anew, and lacks 'decay'"):
            loader.part(frozenset({"q", "down"}))
    with pytest.raises(ManifestError, match="no parameter 'nobody'"):
        loader.part(frozenset({"nobody"}))
    assert {key: tensor.tolist() for key, tensor in state(loader._model).items()} == {
        key: tensor.tolist() for key, tensor in before.items()
    }


class Anew(Loader):
    """Builds layers anew from what is loaded for them: whatever else they had is lost."""

    def _layers(self, names):
        return {landing.param.rpartition(".")[0] for name in names for landing in self.landings(name)}

    def _stays(self, param):
        return False

    def _loaded_with(self, touched):
        return [name for name in SHAPES if not self.patchable(name) and self._layers([name]) & self._layers(touched)]

    def _open(self, names):
        opened = super()._open(names)
        for layer in self._layers(SHAPES if names is None else names):
            for own in getattr(self._model, layer).parameters():
                own.data.fill_(torch.nan)
        return opened


def test_what_shares_a_layer_that_is_built_anew_has_to_come_with_it(rank, tmp_path):
    save_file(weights(0), tmp_path / "model.safetensors")
    loader = Anew(cold(rank, 0), tmp_path)
    loader.check(as_source(weights(0)).params())
    assert loader.rehearse()["changes"] == "in place"  # the changed layers are loaded, and no others
    with pytest.raises(ManifestError, match="lacks 'corner' for them"):
        loader.part(frozenset({"decay", "q"}))
    names = {"decay", "corner", "q"}
    loader.part(frozenset(names))
    loader.start()
    loader.load(of(loader, 1, names))
    loader.finish()
    assert_is(loader._model, mixed(rank, 1, names))


def test_what_stays_as_it_is_while_its_layer_is_built_anew_needs_not_come_and_opens_it_all_the_same():
    at = {"weight": "layer.weight", "bias": "layer.bias", "other": "norm.weight"}
    landings = {name: [SimpleNamespace(param=param)] for name, param in at.items()}
    assert apart({"bias", "other"}, landings) == {"other"}
    assert apart({"bias", "other"}, landings, lambda param: param == "layer.bias") == {"bias", "other"}
    assert apart({"weight", "other"}, landings, lambda param: param == "layer.bias") == {"other"}


def test_what_did_not_come_of_a_part_is_named(loader):
    loader.by_slices(False)
    loader.part(frozenset({"q", "k"}))
    loader.start()
    loader.load(of(loader, 1, {"k"}))
    with pytest.raises(IntegrityError, match="1 of the parameters that were announced did not come, first 'q'"):
        loader.finish()


def test_digests_are_those_of_the_part(loader):
    loader.by_slices(False)
    loader.part(frozenset({"q", "down", "decay", "corner"}))
    loader.start()
    loader.load(of(loader, 1, {"q", "down", "decay", "corner"}))
    loader.finish()
    assert loader.digests() == {name: tensor_digest(weights(1)[name]) for name in ("q", "down", "decay", "corner")}
