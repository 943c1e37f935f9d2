"""Changes land where a loader would have put them: whatever it narrows, turns, stacks and fuses."""

import numpy as np
import pytest
import torch

from tests.landing.changes import Listed
from torchrl_ext.codecs.patch import SparsePatch, StepPatch, diff
from torchrl_ext.codecs.units import unit_of, units
from torchrl_ext.errors import ConfigError, IntegrityError, NotConnectedError
from torchrl_ext.kernels.base import LINEAR, kernels_on
from torchrl_ext.kernels.torch_ops import TorchKernels
from torchrl_ext.landing.loader import TensorsLoader
from torchrl_ext.landing.patcher import READ_BACK_VERSIONS, Patcher, Piece, as_bits, compare, identity
from torchrl_ext.landing.placement import record
from torchrl_ext.testing import same_bits
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.digests import PositionDigest, position_digest

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
SIZES = {"q": (8, 6), "k": (4, 6), "v": (4, 6), "gate": (10, 6), "up": (10, 6), "down": (6, 10), "turned": (6, 4)}
SIZES |= {"packed_qkv": (24, 6), "embed": (9, 6), **{f"expert{e}": (4, 6) for e in range(3)}, "norm": (6,), "scale": ()}


class Engine:
    """Parameters as engines keep them, and a loader of a few lines, for worker ``rank`` of ``world``."""

    def __init__(self, make, rank, world):
        self.rank, self.world = rank, world
        shapes = {
            "qkv": (16 // world, 6),
            "gate_up": (20 // world, 6),
            "down": (6, 10 // world),
            "turned": (4, 6),
            "unpacked": (24 // world, 6),
            "embed": (10 // world, 6),
            "experts": (3, 4, 6),
            "norm": (6,),
            "scale": (),
        }
        self.params = {name: make(shape) for name, shape in shapes.items()}

    def load_weights(self, pairs):
        params, rank, world = self.params, self.rank, self.world
        starts = {"q": 0, "k": 8 // world, "v": 12 // world, "gate": 0, "up": 10 // world}
        for name, tensor in pairs:
            rows = (tensor.shape[0] if tensor.dim() else 0) // world
            if name in starts:
                fused = params["gate_up" if name in ("gate", "up") else "qkv"]
                fused.narrow(0, starts[name], rows).copy_(tensor.narrow(0, rank * rows, rows))
            elif name == "down":
                params["down"].copy_(tensor.narrow(1, rank * 10 // world, 10 // world))
            elif name == "turned":
                params["turned"].copy_(tensor.t())
            elif name == "packed_qkv":  # heads of (q, k, v) one after the other in the checkpoint, apart in the engine
                heads = tensor.view(4, 3, 2, 6)[rank * 4 // world : (rank + 1) * 4 // world]
                for part in range(3):
                    own = params["unpacked"].view(3, 4 // world, 2, 6)[part]
                    own.copy_(heads[:, part])
            elif name == "embed":  # nine rows in ten places
                first = rank * 10 // world
                held = tensor[first : min(9, first + 10 // world)]
                params["embed"][: held.shape[0]].copy_(held)
            elif name.startswith("expert"):
                params["experts"][int(name[-1])].copy_(tensor)
            else:
                params[name].copy_(tensor)


def from_units(values, meta):
    """A tensor over the memory of ``values`` (unsigned, 1-D)."""
    return torch.from_numpy(values).view(meta.dtype).reshape(meta.shape)


def random_bits(shape, dtype, generator):
    meta = ParamMeta("any", dtype, tuple(shape))
    unit = unit_of(dtype)
    raw = generator.integers(0, 2 if dtype == torch.bool else 256, (unit.count(meta) * unit.width,), np.uint8)
    return from_units(raw.view(unit.dtype), meta)


def pieces_of(engine, metas):
    """The placement, recorded on tensors without data, on the engine's own parameters."""
    stand_in = Engine(lambda shape: torch.empty(shape, dtype=metas[0].dtype, device="meta"), engine.rank, engine.world)
    placement = record(stand_in.load_weights, metas, stand_in.params)
    found = {}
    for meta in metas:
        found[meta.name] = []
        for landing in placement.landings[meta.name]:
            found[meta.name].append(landing.piece(engine.params[landing.param]))
    return found


def patched_copy(tensor, density, generator):
    """Another tensor, some of whose elements have other bits."""
    fresh, own = units(random_bits(tensor.shape, tensor.dtype, generator)), units(tensor)
    return from_units(np.where(generator.random(own.shape) < density, fresh, own), ParamMeta.of("any", tensor))


def as_kind(patch, kind, old, new):
    if kind == "dense":
        every = units(new).copy()
        return SparsePatch(patch.meta, np.arange(every.size, dtype=np.int32), every)
    if kind == "sparse":
        return patch
    unit = unit_of(patch.meta.dtype)
    before = units(old)[patch.indices].astype(np.uint64)
    steps = line(patch.values.astype(np.uint64), unit) - line(before, unit)
    return StepPatch(patch.meta, patch.indices, (steps & unit.mask).astype(unit.dtype))


def line(bits, unit):
    """Bits on the ordered line: of sign-magnitude formats the negative ones run backwards."""
    negative = (bits & unit.top) != 0
    return np.where(negative, unit.mask - bits, bits | unit.top) & unit.mask if unit.ordered else bits


def held_digest(pieces):
    words = (kernels_on(piece.memory.device).words(piece, LINEAR) for piece in pieces)
    return sum((PositionDigest(*each) for each in words), PositionDigest())


@pytest.mark.parametrize("kind", ["sparse", "steps", "dense"])
@pytest.mark.parametrize(("rank", "world"), [(0, 1), (0, 2), (1, 2)])
def test_a_patched_engine_equals_one_that_loaded_the_new_tensors(rank, world, kind):
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64):
        for density in (0.02, 0.3, 1.0):
            assert_patched_as_loaded(dtype, rank, world, density, kind)


def assert_patched_as_loaded(dtype, rank, world, density, kind):
    generator = np.random.default_rng(7)
    old = {name: random_bits(shape, dtype, generator) for name, shape in SIZES.items()}
    new = {name: patched_copy(tensor, density, generator) for name, tensor in old.items()}
    metas = [ParamMeta.of(name, tensor) for name, tensor in old.items()]
    patched, loaded = (Engine(lambda shape: torch.zeros(shape, dtype=dtype), rank, world) for _ in range(2))
    patched.load_weights(old.items())
    loaded.load_weights(new.items())
    patcher = Patcher(pieces_of(patched, metas))
    patches = []
    for meta in metas:
        patch = diff(meta, old[meta.name], new[meta.name])
        patches.append(as_kind(patch, kind, old[meta.name], new[meta.name]))
    before = {name: as_bits(tensor).clone() for name, tensor in patched.params.items()}
    staged = patcher.stage(Listed(*patches))
    assert all(torch.equal(as_bits(tensor), before[name]) for name, tensor in patched.params.items())
    patcher.commit()
    for name, tensor in loaded.params.items():
        assert torch.equal(as_bits(patched.params[name]), as_bits(tensor)), (name, dtype, density)
    for name, pieces in patcher.pieces.items():
        assert staged[name] == held_digest(pieces), name


@pytest.mark.parametrize("kind", ["sparse", "steps", "dense"])
def test_every_dtype_lands_in_tensors_that_are_stored_as_sent(kind):
    for dtype in DTYPES:
        generator = np.random.default_rng(11)
        old, new = (random_bits((13, 7), dtype, generator) for _ in range(2))
        new[3:] = old[3:]
        live, meta = {"w": old.clone()}, ParamMeta.of("w", old)
        patcher = Patcher(identity(live))
        staged = patcher.stage(Listed(as_kind(diff(meta, old, new), kind, old, new)))
        assert np.array_equal(units(live["w"]), units(old)), dtype
        patcher.commit()
        assert np.array_equal(units(live["w"]), units(new)), dtype
        assert staged["w"] == position_digest(live["w"]), dtype


def test_the_workers_shares_add_up_to_the_digest_of_the_whole():
    generator = np.random.default_rng(3)
    tensors = {name: random_bits(SIZES[name], torch.bfloat16, generator) for name in ("q", "down", "packed_qkv")}
    metas = [ParamMeta.of(name, tensor) for name, tensor in tensors.items()]
    shares = []
    for rank in range(2):
        engine = Engine(lambda shape: torch.zeros(shape, dtype=torch.bfloat16), rank, 2)
        engine.load_weights(tensors.items())
        shares.append(pieces_of(engine, metas))
    for name, tensor in tensors.items():
        assert held_digest(shares[0][name]) + held_digest(shares[1][name]) == position_digest(tensor)


def step(old, new):
    digests = {name: position_digest(tensor, LINEAR).hex() for name, tensor in new.items()}
    return Listed(
        *(diff(ParamMeta.of(name, tensor), tensor, new[name]) for name, tensor in old.items()), digests=digests
    )


def state(seed):
    generator = np.random.default_rng(seed)
    return {name: random_bits((40, 50), torch.bfloat16, generator) for name in ("a", "b")}


def test_a_patcher_follows_step_after_step_and_its_digests_stay_those_of_the_bytes():
    generator, old = np.random.default_rng(0), state(1)
    live = {name: tensor.clone() for name, tensor in old.items()}
    patcher = Patcher(identity(live))
    for density in (0.01, 0.5, 0.0, 0.01):
        new = {name: patched_copy(tensor, density, generator) for name, tensor in old.items()}
        change = step(old, new)
        compare(patcher.stage(change), change.digests)
        patcher.commit()
        assert all(torch.equal(as_bits(live[name]), as_bits(tensor)) for name, tensor in new.items())
        assert {name: digest.hex() for name, digest in patcher.held(LINEAR).items()} == change.digests
        old = new


class Watched(TorchKernels):
    """Kernels that count the elements that they digest, and can lose a write."""

    digested, losing = 0, False

    def words(self, piece, digest):
        self.digested += piece.destination.numel()
        return super().words(piece, digest)

    def scatter(self, target, offsets, values):
        super().scatter(target.clone() if self.losing else target, offsets, values)
        return (target[offsets] == values).all()


def test_a_commit_digests_nothing_and_all_tensors_are_read_back_before_pauses():
    generator, old, kernels = np.random.default_rng(0), state(1), Watched()
    patcher = Patcher(identity({name: tensor.clone() for name, tensor in old.items()}), kernels)
    patcher.held(LINEAR)
    kernels.digested = 0
    for turn in range(READ_BACK_VERSIONS):
        new = {name: patched_copy(tensor, 0.01, generator) for name, tensor in old.items()}
        patcher.stage(step(old, new))
        before_pause = kernels.digested
        patcher.commit()
        assert kernels.digested == before_pause, turn
        old = new
    assert kernels.digested == sum(tensor.numel() for tensor in old.values())


def test_damage_that_is_found_before_a_pause_ends_the_update_in_it_and_nothing_is_written():
    old = state(1)
    new = {name: tensor.clone() for name, tensor in old.items()}
    as_bits(new["a"]).view(-1)[5] ^= 1
    live = {name: tensor.clone() for name, tensor in old.items()}
    patcher, forth, back = Patcher(identity(live)), step(old, new), step(new, old)
    patcher.held(LINEAR)
    as_bits(live["b"]).view(-1)[17] ^= 1
    steps = 0
    with pytest.raises(IntegrityError, match="tensor 'b'"):
        while steps < READ_BACK_VERSIONS:
            taken, steps = (back if steps % 2 else forth), steps + 1
            compare(patcher.stage(taken), taken.digests)
            patcher.drop()  # the update of another worker failed, say: this one still has to end
            compare(patcher.stage(taken), taken.digests)
            before = {name: as_bits(tensor).clone() for name, tensor in live.items()}
            patcher.commit()
    assert all(torch.equal(as_bits(live[name]), bits) for name, bits in before.items())
    patcher.forget()  # a whole version comes
    live["b"].copy_(old["b"])
    taken = back if torch.equal(as_bits(live["a"]), as_bits(new["a"])) else forth
    compare(patcher.stage(taken), taken.digests)
    patcher.commit()


def test_a_write_that_is_lost_is_found_in_the_pause_and_named():
    old = state(1)
    new = {name: tensor.clone() for name, tensor in old.items()}
    as_bits(new["b"]).view(-1)[[5, 1005]] ^= 1
    patcher = Patcher(identity({name: tensor.clone() for name, tensor in old.items()}), Watched())
    patcher.stage(step(old, new))
    patcher._kernels.losing = True
    with pytest.raises(IntegrityError, match="tensor 'b'"):
        patcher.commit()


def test_another_base_is_found_while_staging_and_named():
    old = state(1)
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["b"].view(-1)[5] = 1.0
    live = {name: tensor.clone() for name, tensor in old.items()}
    live["b"].view(-1)[17] = 2.0
    kept = {name: tensor.clone() for name, tensor in live.items()}
    patcher, change = Patcher(identity(live)), step(old, new)
    found = patcher.stage(change)
    with pytest.raises(IntegrityError, match="tensor 'b'"):
        compare(found, change.digests)
    patcher.drop()
    assert all(torch.equal(as_bits(live[name]), as_bits(tensor)) for name, tensor in kept.items())
    with pytest.raises(NotConnectedError):
        patcher.commit()


@pytest.mark.parametrize("how", ["data", "parameter"])
def test_parameters_that_are_replaced_between_stage_and_commit_are_not_passed_by(how):
    module = torch.nn.Linear(3, 2)
    old = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    loader, new = TensorsLoader(module), {name: tensor + 1 for name, tensor in old.items()}
    loader.check(ParamMeta.of(name, tensor) for name, tensor in old.items())
    loader.stage(step(old, new))
    if how == "data":
        module.weight.data = old["weight"].clone()
    else:
        module.weight = torch.nn.Parameter(old["weight"].clone())
    with pytest.raises(NotConnectedError, match="were replaced"):
        loader.commit()
    assert all(torch.equal(tensor, old[name]) for name, tensor in module.state_dict().items())
    loader.stage(step(old, new))
    loader.commit()
    assert all(torch.equal(tensor, new[name]) for name, tensor in module.state_dict().items())


def test_what_waits_for_the_pause_takes_no_more_than_twice_the_payload():
    generator = np.random.default_rng(5)
    old = random_bits((1000, 300), torch.bfloat16, generator)
    for density in (0.001, 0.01, 0.3, 0.5, 1.0):
        new = patched_copy(old, density, generator)
        live = {"fused": torch.zeros(2000, 300, dtype=torch.bfloat16)}
        piece = Piece(destination=live["fused"][500:1500], offset=0, strides=(300, 1))
        piece.destination.copy_(old)
        patch = diff(ParamMeta.of("w", old), old, new)
        patcher = Patcher({"w": [piece]})
        patcher.stage(Listed(patch))
        assert patch.values.nbytes <= patcher.staged_bytes <= 2 * (patch.indices.nbytes + patch.values.nbytes)
        patcher.commit()
        assert not patcher.staged_bytes
        assert torch.equal(as_bits(live["fused"][500:1500]), as_bits(new))
        assert not live["fused"][:500].any() and not live["fused"][1500:].any()


def test_large_changes_are_written_by_several_threads_to_the_same_end():
    generator = np.random.default_rng(9)
    old, new = (random_bits((3000, 1000), torch.bfloat16, generator) for _ in range(2))
    new[::2] = old[::2]
    live = {"w": torch.zeros(3000, 2000, dtype=torch.bfloat16)}
    piece = Piece(destination=live["w"][:, 700:1700], offset=0, strides=(1000, 1))
    piece.destination.copy_(old)
    patcher = Patcher({"w": [piece]})
    patcher.stage(Listed(diff(ParamMeta.of("w", old), old, new)))
    patcher.commit()
    assert torch.equal(as_bits(live["w"][:, 700:1700]), as_bits(new))
    assert not as_bits(live["w"][:, :700]).any() and not as_bits(live["w"][:, 1700:]).any()


def test_a_view_that_repeats_elements_is_no_piece():
    row = torch.arange(3.0)
    with pytest.raises(ConfigError, match=r"sizes \[2, 3\] and strides \[0, 1\]"):
        Piece(destination=torch.zeros(2, 3), offset=0, strides=row.expand(2, 3).stride())
    assert Piece(destination=torch.zeros(1, 3), offset=0, strides=(0, 1)).end == 3


def test_many_small_tensors_wait_for_the_pause_as_one_list():
    generator = np.random.default_rng(4)
    old = {f"expert{e}": random_bits((7, 9), torch.bfloat16, generator) for e in range(500)}
    new = {name: patched_copy(tensor, 0.05, generator) for name, tensor in old.items()}
    live = {name: tensor.clone() for name, tensor in old.items()}
    patcher, change = Patcher(identity(live)), step(old, new)
    writes = []
    kernels = kernels_on(torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        write = type(kernels).write
        patch.setattr(type(kernels), "write", lambda own, all_of: writes.append(all_of) or write(own, all_of))
        compare(patcher.stage(change), change.digests)
        patcher.commit()
    assert len(writes) == 1 and writes[0].ends.numel() == sum(not same_bits(old[name], new[name]) for name in old)
    assert all(same_bits(live[name], tensor) for name, tensor in new.items())


def test_a_patch_that_touches_nothing_here_writes_nothing():
    old = torch.zeros(8, 6)
    new = old.clone()
    new[0, 0] = 1.0
    own = torch.zeros(4, 6)
    piece = Piece(destination=own, offset=24, strides=(6, 1))  # the second worker's half
    patch = diff(ParamMeta.of("q", old), old, new)
    patcher = Patcher({"q": [piece]})
    staged = patcher.stage(Listed(patch))
    assert patcher.staged_bytes == 0 and isinstance(patch, SparsePatch)
    patcher.commit()
    assert not own.any() and staged["q"] == held_digest([piece])
