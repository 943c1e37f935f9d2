"""A worker of a sharded model needs some blocks of each tensor, and lands them as it would land whole tensors."""

from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.engines.processed import Unprocessed
from torchrl_ext.base.errors import ConfigError, IntegrityError, ManifestError
from torchrl_ext.data.landing.sliced import Sliced, part_of
from torchrl_ext.data.weights.blocks import Block
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.data.weights.digests import position_digest
from torchrl_ext.engines.loader import EngineLoader, StandIns, swapped
from torchrl_ext.engines.runtime import reachable

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
        elif name == "scale":
            self.norm.scale.data.copy_(tensor.reshape(1))


class Sharded(Unprocessed):
    """What a loader sees of a rank's `Model`: ``down`` is packed after it was loaded, and opened for a load.

    Args:
        module: the `Model`.
        checkpoint: what it was started with.
        anew: build layers anew from what is loaded for them, so that whatever else they had is lost.
        derives: keep a copy of ``qkv`` to compute with, which loads of the whole model bring up to date.
    """

    group, alone, shared = None, False, True

    def __init__(self, module, checkpoint, *, anew=False, derives=False):
        save_file(weights(0), checkpoint / "model.safetensors")
        super().__init__(module, checkpoint)
        self.by_layer, self._derives, self.opened = anew, derives, []

    @contextmanager
    def stand_ins(self):
        def form(layer):
            shapes = {name: own.shape for name, own in layer._parameters.items()}
            shapes |= {"weight": (HIDDEN, 6)} if layer is self.module.down else {}
            return {name: empty(shape, device="meta") for name, shape in shapes.items()}, {}

        with swapped(self.module, form) as tensors:
            partly = {"embed.weight", "mixer.corner", "norm.scale"}
            yield StandIns(tensors, {name: one.numel() for name, one in tensors.items() if name not in partly})
        self.module.handed.clear()

    def open(self, layers):
        self.opened.append(None if layers is None else sorted(layers))
        if layers is None or "down" in layers:
            self.module.down.weight = empty((HIDDEN, 6))
        opened = [layer for path, layer in self.module.named_children() if layers is None or path in layers]
        for layer in opened if self.by_layer else ():
            for own in layer.parameters():
                own.data.fill_(torch.nan)
        return opened

    def close(self, layers):
        if self.module.down in layers:
            pack(self.module.down)
        if self._derives and len(layers) == len([*self.module.children()]):
            derive(self.module)


def empty(shape, device="cpu"):
    return nn.Parameter(torch.full(shape, torch.nan, device=device), requires_grad=False)


def derive(model):
    model.qkv.copy = model.qkv.weight.data.clone()
    return model


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


def loader_of(module, folder, by_slices=True, **how):
    found = EngineLoader(Sharded(module, folder, **how))
    found.by_slices(by_slices)
    found.check(as_source(weights(0)).params())
    found.compare_start()
    return found


@pytest.fixture
def loader(rank, tmp_path):
    return loader_of(cold(rank, 0), tmp_path)


def sent(loader, seed, targets, names=SHAPES):
    """What a transport yields that fills targets where they are given."""
    for name, tensor in (weights(seed) if isinstance(seed, int) else seed).items():
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
    assert "computes mixer.decay" in whole["decay"] and "not adjacent" in whole["corner"]


def test_start_checkpoint_counts_as_held_until_invalidation(loader):
    expected = {name: position_digest(tensor).hex() for name, tensor in weights(0).items()}
    assert loader.digests() == expected
    loader.invalidate()
    with pytest.raises(ConfigError, match="base="):
        loader.digests()


def test_what_an_update_brought_is_no_base_of_the_next_one(loader):
    """Its digests may be of some tensors, or of none."""
    loader.by_slices(False)
    part = {name: weights(1)[name] for name in ("decay", "down")}
    loader.part(frozenset(part))
    loader.start()
    loader.load(part.items())
    loader.finish()
    assert loader.digests() == {name: position_digest(tensor).hex() for name, tensor in part.items()}
    loader.part(None)
    with pytest.raises(ConfigError, match="base="):
        loader.digests()


@pytest.mark.parametrize("by_targets", [True, False])
def test_slices_land_as_a_cold_start_lands_whole_tensors(loader, rank, by_targets):
    for seed in (1, 2, 0):
        updated(loader, seed, by_targets)
        assert_is(loader.model.module, cold(rank, seed))


def test_plain_tensors_land_in_live_memory_of_unopened_layers(loader, rank):
    loader.start()
    targets = loader.targets()
    assert targets.keys() == {"embed", "q", "k", "v", "gate_up", "turned", "norm", "scale"} | {
        f"experts.{2 * rank + index}.w" for index in range(2)
    }
    live = dict(loader.model.module.named_parameters())
    block = Block((6 * rank, 2), (6 * rank + 6, 3))
    assert part_of(targets["turned"], block).data_ptr() == live["turned.weight"][2].data_ptr()
    assert part_of(targets["gate_up"], loader.slices()["gate_up"][0]).shape == (2, 2 * INNER, HIDDEN)
    loader.load(sent(loader, 1, targets))
    loader.finish()
    assert loader.model.module.handed == ["down", "decay", "corner"] and loader.model.opened == [["down", "mixer"]]
    assert_is(loader.model.module, cold(rank, 1))


def test_only_tensors_that_a_worker_needs_count_as_missing(loader, rank):
    loader.start()
    loader.load(pair for pair in sent(loader, 1, {}) if pair[0] not in ("q", "decay"))
    assert loader.missing() == ["decay", "q"]
    with pytest.raises(IntegrityError, match=r"2 of the parameters .*'decay'"):
        loader.finish()
    updated(loader, 2)
    assert_is(loader.model.module, cold(rank, 2))


@pytest.mark.parametrize("name", ["q", "down"])
def test_a_slice_too_little_is_an_error_and_no_old_weight(loader, rank, name):
    ((_, tensor),) = sent(loader, 1, {}, [name])
    (block, data), *_ = tensor.parts
    short = Block(block.start, (block.stop[0] - 1, block.stop[1]))
    loader.start()
    with pytest.raises(IntegrityError, match=f"of tensor '{name}' did not come"):
        loader.load([(name, Sliced.of(tensor.meta, [(short, data[:-1])]))])
    updated(loader, 2)
    assert_is(loader.model.module, cold(rank, 2))


def test_a_rehearsal_takes_the_route_of_updates(loader, rank, monkeypatch):
    seen = []
    land = Model._load
    monkeypatch.setattr(Model, "_load", lambda self, name, tensor: seen.append(tensor) or land(self, name, tensor))
    assert loader.unrehearsed() and loader.rehearse()["restored"]
    assert loader.proof() == "rehearsed" and not loader.unrehearsed()
    assert_is(loader.model.module, cold(rank, 0))
    assert any(isinstance(tensor, Sliced) for tensor in seen)
    loader.by_slices(False)  # of whole tensors nothing was shown
    assert loader.proof() == "sent" and loader.unrehearsed()
    loader.rehearse()
    assert loader.proof() == "rehearsed" and loader.model.opened[-1] is None


def test_derived_copy_gets_slices_only_through_its_model_loader(rank, tmp_path):
    loader = loader_of(derive(cold(rank, 0)), tmp_path, derives=True)
    loader.start()
    assert loader.targets()
    updated(loader, 0)
    loader.modified = False  # it was started with these
    loader.rehearse()
    assert loader.proof() == "rehearsed"
    updated(loader, 1)
    assert_is(loader.model.module, derive(cold(rank, 1)))
    loader.start()
    assert not loader.targets()


def loaded(loader, seed, names, by_slices):
    """Load a part."""
    loader.part(frozenset(names))
    loader.start()
    by_name = {name: tensor for name, tensor in weights(seed).items() if name in names}
    loader.load(sent(loader, seed, loader.targets(), names) if by_slices else by_name.items())
    loader.finish()
    digests = loader.digests()
    loader.part(None)
    return digests


def mixed(rank, seed, names):
    """The model as a start from weights makes it of which these have the other seed."""
    model = Model(rank)
    model.load_weights({**weights(0), **{name: weights(seed)[name] for name in names}}.items())
    pack(model.down)
    return model


@pytest.mark.parametrize("by_slices", [False, True])
def test_partial_update_lands_like_a_cold_start(loader, rank, by_slices):
    loader.by_slices(by_slices)
    landed = set()
    for names in ({"q", "embed", "experts.1.w"}, {"v", "norm"}, {"down", "decay", "corner", "k"}):
        digests = loaded(loader, 1, names, by_slices)
        landed |= names
        assert_is(loader.model.module, mixed(rank, 1, landed))
        assert by_slices or digests == {name: position_digest(weights(1)[name]).hex() for name in names}
    assert loader.model.opened == [["down", "mixer"]]
    assert {"down", "decay"} <= set(loader.model.module.handed) <= {"down", "decay", "corner"}


@pytest.mark.parametrize("by_slices", [False, True])
def test_partial_update_that_lacks_a_rebuild_input_is_refused(rank, tmp_path, by_slices):
    loader = loader_of(cold(rank, 0), tmp_path, by_slices, anew=True)
    with pytest.raises(ManifestError, match=r"'decay' .*lacks 'corner'"):
        loader.part(frozenset({"decay", "q"}))
    with pytest.raises(ManifestError, match="no parameter 'nobody'"):
        loader.part(frozenset({"nobody"}))
    assert_is(loader.model.module, cold(rank, 0))
    loader.part(frozenset({"q", "k"}))
    loader.start()
    loader.load(sent(loader, 1, {}, ["k"]) if by_slices else [("k", weights(1)["k"])])
    with pytest.raises(IntegrityError, match=r"1 of the parameters .*'q'"):
        loader.finish()


def test_changes_reload_only_rebuilt_layers_as_a_whole(rank, tmp_path):
    loader = loader_of(cold(rank, 0), tmp_path, by_slices=False, anew=True)
    assert loader.rehearse()["changes"] == "in place" and loader.model.opened[1] == ["down", "mixer"]
    loaded(loader, 1, {"decay", "corner", "q"}, by_slices=False)
    assert_is(loader.model.module, mixed(rank, 1, {"decay", "corner", "q"}))


class Deriving(nn.Module):
    """A layer whose loader derives a parameter, a buffer, a module and attributes from the weight."""

    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(2, 2), requires_grad=False), 1.0

    def load(self):
        self.weight_t = nn.Parameter(self.weight.data.t(), requires_grad=False)
        self.register_buffer("sums", self.weight.data.sum(0), persistent=False)
        self.derived, self.absorbed, self.scale = self.weight.data * 2, nn.Linear(2, 2, device="meta"), 2.0


def test_nothing_that_a_loader_derives_from_stand_ins_stays():
    layer = Deriving()
    before, weight = set(vars(layer)), layer.weight
    with swapped(layer, lambda module: ({"weight": module.weight.to("meta")}, {})):
        layer.load()
        assert layer.weight_t.is_meta and layer.derived.is_meta
    assert set(vars(layer)) == before and layer.weight is weight and layer.scale == 1.0
    assert [*layer.state_dict(keep_vars=True)] == ["weight"] and not [*layer.buffers(), *layer.children()]
    assert not layer._non_persistent_buffers_set


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda sent: sent.update(strange=torch.zeros(2)), "no parameter 'strange'"),
        (lambda sent: sent.pop("k"), "'k' is missing"),
        (lambda sent: sent.update(norm=torch.zeros(HIDDEN + 1)), "norm.*shape"),
        (lambda sent: sent.update(norm=sent["norm"].double()), "norm.*round"),
    ],
    ids=["unknown", "missing", "misshapen", "rounded"],
)
def test_unfit_update_is_refused_and_changes_no_weight(loader, rank, change, words):
    update = weights(1)
    change(update)
    with pytest.raises(ManifestError, match=words):
        loader.check(as_source(update).params())
    assert_is(loader.model.module, cold(rank, 0))
