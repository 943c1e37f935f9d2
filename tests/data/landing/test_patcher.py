"""Changes land where a loader would have put them: whatever it narrows, turns, stacks and fuses; and where that is."""

import pytest
import torch

from tests.data.deltas.data import Listed, diff, random_bits, steps_of
from tests.data.deltas.data import patch_of as made
from tests.lag.device import waits
from torchrl_ext.base.deadline import in_thread
from torchrl_ext.base.errors import IntegrityError, ManifestError, NotConnectedError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.deltas import loops, torch_ops
from torchrl_ext.data.deltas.torch_ops import kernels_on
from torchrl_ext.data.landing.loader import TensorsLoader
from torchrl_ext.data.landing.patcher import READ_BACK_VERSIONS, Patcher, Piece, as_bits, compare, identity
from torchrl_ext.data.landing.placement import record
from torchrl_ext.data.weights.digests import PositionDigest, as_digests, position_digest
from torchrl_ext.testing import WAIT_S, same_bits

SIZES = {"q": (8, 6), "k": (4, 6), "v": (4, 6), "down": (6, 10), "turned": (6, 4), "packed_qkv": (24, 6)}
SIZES |= {"embed": (9, 6), **{f"expert{e}": (4, 6) for e in range(3)}, "norm": (6,), "scale": ()}


class Engine:
    """Parameters as engines keep them, and a loader of a few lines, for worker ``rank`` of ``world``."""

    def __init__(self, make, rank, world):
        self.rank, self.world = rank, world
        shapes = {
            "qkv": (16 // world, 6),
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
        starts = {"q": 0, "k": 8 // world, "v": 12 // world}
        for name, tensor in pairs:
            rows = (tensor.shape[0] if tensor.dim() else 0) // world
            if name in starts:
                params["qkv"].narrow(0, starts[name], rows).copy_(tensor.narrow(0, rank * rows, rows))
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
                params["embed"][held.shape[0] :].fill_(0)
            elif name.startswith("expert"):
                params["experts"][int(name[-1])].copy_(tensor)
            else:
                params[name].copy_(tensor)


def random_tensor(shape, dtype, generator):
    return random_bits(torch.Size(shape).numel(), dtype, generator).reshape(shape)


def pieces_of(engine, metas):
    """The placement, recorded on tensors without data, on the engine's own parameters."""
    stand_in = Engine(lambda shape: torch.empty(shape, dtype=metas[0].dtype, device="meta"), engine.rank, engine.world)
    placement = record(stand_in.load_weights, metas, stand_in.params)
    landings = placement.landings.items()
    return {name: [landing.piece(engine.params[landing.param]) for landing in own] for name, own in landings}


def patched_copy(tensor, density, generator):
    """Another tensor, some of whose elements have other bits."""
    where = torch.rand(tensor.shape, generator=generator) < density
    return torch.where(where, random_tensor(tensor.shape, tensor.dtype, generator), tensor)


def patch_of(kind, meta, old, new):
    """The change of a tensor: as new bits, or as steps."""
    if kind == "sparse":
        return diff(meta, old, new)
    positions, steps = steps_of(old, new)
    return made(meta, positions, steps, steps=True)


def held_digest(pieces):
    words = [kernels_on(piece.memory.device).words([piece]) for piece in pieces]
    return sum(as_digests(words), PositionDigest())


@pytest.mark.parametrize("kind", ["sparse", "steps"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_patched_engines_equal_those_that_loaded_the_new_tensors(dtype, kind):
    for world, density in ((1, 1.0), (2, 0.02)):
        generator = torch.Generator().manual_seed(7)
        old = {name: random_tensor(shape, dtype, generator) for name, shape in SIZES.items()}
        new = {name: patched_copy(tensor, density, generator) for name, tensor in old.items()}
        metas = [ParamMeta.of(name, tensor) for name, tensor in old.items()]
        changes = Listed(*(patch_of(kind, meta, old[meta.name], new[meta.name]) for meta in metas))
        total = {name: PositionDigest() for name in old}
        for rank in range(world):
            patched, loaded = (Engine(lambda shape: torch.zeros(shape, dtype=dtype), rank, world) for _ in range(2))
            patched.load_weights(old.items())
            loaded.load_weights(new.items())
            patcher = Patcher(pieces_of(patched, metas))
            before = {name: tensor.clone() for name, tensor in patched.params.items()}
            staged = patcher.stage(changes)
            assert all(same_bits(tensor, before[name]) for name, tensor in patched.params.items())
            patcher.commit()
            for name, tensor in loaded.params.items():
                assert same_bits(patched.params[name], tensor), (name, density)
            for name, pieces in patcher.pieces.items():
                assert staged[name] == held_digest(pieces), name
                total[name] += staged[name]
            patcher.undo()
            assert all(same_bits(tensor, before[name]) for name, tensor in patched.params.items())
            assert patcher.stage(changes) == staged
            patcher.commit()
            patcher.keep()
            with pytest.raises(NotConnectedError, match="not known"):
                patcher.undo()
            assert all(same_bits(patched.params[name], tensor) for name, tensor in loaded.params.items())
        for name in ("q", "down", "packed_qkv"):  # of which each worker holds a share of its own
            assert total[name] == position_digest(new[name]), name


def step(old, new):
    digests = {name: position_digest(tensor).hex() for name, tensor in new.items()}
    patches = (diff(ParamMeta.of(name, tensor), tensor, new[name]) for name, tensor in old.items())
    return Listed(*patches, digests=digests)


def state(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: random_tensor((200, 100), torch.bfloat16, generator) for name in ("a", "b")}


def copy_of(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def flipped():
    """A state, the same with two bits of one tensor flipped, the change, and a copy that is live."""
    old = state(1)
    new = copy_of(old)
    as_bits(new["b"]).view(-1)[[5, 1005]] ^= 1
    return old, new, step(old, new), copy_of(old)


class Watched:
    """Loops that count the elements that they digest, and can write something else than they are given."""

    digested, late = 0, False

    def __init__(self, own=torch_ops):
        self.own, self.on_host, self.land = own, own.on_host, own.land

    def words(self, pieces):
        self.digested += sum(piece.destination.numel() for piece in pieces)
        return self.own.words(pieces)

    def exchange(self, writes):
        if self.late:
            writes.values.fill_(0x25)
        return self.own.exchange(writes)


def test_patcher_reads_tensors_back_before_pauses_only():
    generator, old, kernels = torch.Generator().manual_seed(0), state(1), Watched()
    live = copy_of(old)
    patcher = Patcher(identity(live), kernels)
    patcher.digests_of_memory()
    kernels.digested = 0
    for turn in range(READ_BACK_VERSIONS):
        new = {name: patched_copy(tensor, (0.01, 0.2, 0.0)[turn % 3], generator) for name, tensor in old.items()}
        change = step(old, new)
        compare(patcher.stage(change), change.digests)
        before_pause = kernels.digested
        patcher.commit()
        assert kernels.digested == before_pause, turn
        assert all(same_bits(live[name], tensor) for name, tensor in new.items())
        old = new
    assert kernels.digested == sum(tensor.numel() for tensor in old.values())
    assert {name: digest.hex() for name, digest in patcher.digests_of_memory().items()} == change.digests


def test_damage_found_before_a_pause_fails_commit_unwritten():
    old, new, forth, live = flipped()
    patcher, back = Patcher(identity(live)), step(new, old)
    patcher.digests_of_memory()
    as_bits(live["a"]).view(-1)[17] ^= 1
    with pytest.raises(IntegrityError, match="tensor 'a'"):
        for turn in range(READ_BACK_VERSIONS):
            taken = back if turn % 2 else forth
            compare(patcher.stage(taken), taken.digests)
            patcher.drop()  # the update of another worker failed, say: this one still has to end
            compare(patcher.stage(taken), taken.digests)
            before = copy_of(live)
            patcher.commit()
    assert all(same_bits(live[name], tensor) for name, tensor in before.items())
    with pytest.raises(NotConnectedError):
        patcher.commit()
    patcher.forget()  # a whole version comes
    live["a"].copy_(old["a"])
    taken, other = (back, forth) if same_bits(live["b"], new["b"]) else (forth, back)
    with pytest.raises(IntegrityError, match="tensor 'b'"):
        compare(patcher.stage(taken), other.digests)
    compare(patcher.stage(taken), taken.digests)
    patcher.commit()


@pytest.mark.parametrize("how", ["data", "parameter"])
def test_parameters_replaced_after_staging_fail_the_commit(how):
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


@pytest.mark.parametrize("threads", [1, 2])
def test_changes_land_in_their_piece_and_nowhere_else(threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    old, new, live, generator = {}, {}, {}, torch.Generator().manual_seed(5)
    for name, dtype in (("a", torch.bfloat16), ("b", torch.float32)):
        old[name] = random_tensor((1000, 300), dtype, generator)
        new[name] = patched_copy(old[name], 0.01, generator)
        live[name] = torch.zeros(1500, 1000, dtype=dtype)
        live[name][500:, :300] = old[name]
    change = step(old, new)
    patcher = Patcher(
        {name: [Piece(destination=one[500:, :300], offset=0, strides=(300, 1))] for name, one in live.items()}
    )
    patcher.stage(change)
    patcher.commit()
    for name, tensor in live.items():
        assert same_bits(tensor[500:, :300], new[name])
        assert not tensor[:500].any() and not tensor[500:, 300:].any()


def test_what_another_stream_staged_is_written_as_meant(lag):
    generator, old = torch.Generator().manual_seed(2), state(1)
    new = {name: patched_copy(tensor, 0.05, generator) for name, tensor in old.items()}
    change = step(old, new)
    with torch.Stream(lag):
        live = {name: tensor.to(lag) for name, tensor in old.items()}
        patcher = Patcher(identity(live))

        def stage():
            compare(patcher.stage(change), change.digests)

        in_thread(stage, "stage").result(WAIT_S)
        patcher.commit()
        assert all(same_bits(live[name].cpu(), tensor) for name, tensor in new.items())


def test_a_device_is_waited_for_twice_for_any_number_of_tensors(lag):
    """Once for digests that are read back, and once for all that is staged; a commit once."""
    for count in (3, 12):
        generator, shape = torch.Generator().manual_seed(3), (200, 100)
        old = {f"{number:02}": random_tensor(shape, torch.bfloat16, generator) for number in range(count)}
        new = {name: patched_copy(tensor, 0.05, generator) for name, tensor in old.items()}
        with torch.Stream(lag):
            pieces = {}
            for number, (name, tensor) in enumerate(old.items()):  # straight, turned, and in the columns of another one
                turned = tensor.t().contiguous().to(lag).t()
                wide = torch.zeros(200, 120, dtype=tensor.dtype, device=lag)
                wide[:, :100] = tensor.to(lag)
                live = (tensor.to(lag), turned, wide[:, :100])[number % 3]
                pieces[name] = [Piece(destination=live, offset=0, strides=(100, 1))]
            patcher = Patcher(pieces)
            for before, after in ((old, new), (new, old)):  # the first time keys go to the device
                change, start = step(before, after), waits()
                compare(patcher.stage(change), change.digests)
                staged = waits()
                patcher.commit()
                landed = waits()
            assert (staged - start, landed - staged) == (2, 1), count
            assert all(same_bits(own[0].destination.cpu(), old[name]) for name, own in pieces.items())


@pytest.mark.parametrize("own", [loops, torch_ops], ids=["loops", "torch_ops"])
def test_a_list_other_than_staged_is_no_proof_of_itself(own):
    (old, _, change, live), kernels = flipped(), Watched(own)
    patcher, kernels.late = Patcher(identity(live), kernels), True
    compare(patcher.stage(change), change.digests)
    with pytest.raises(IntegrityError, match="tensor 'b'"):
        patcher.commit()
    kernels.late = False
    patcher.undo()  # by what was read before it was overwritten
    assert all(same_bits(live[name], tensor) for name, tensor in old.items())


@pytest.mark.parametrize("own", [loops, torch_ops], ids=["loops", "torch_ops"])
def test_a_way_back_that_leads_elsewhere_is_no_way_back(own):
    (*_, change, live), kernels = flipped(), Watched(own)
    patcher = Patcher(identity(live), kernels)
    compare(patcher.stage(change), change.digests)
    with pytest.raises(NotConnectedError, match="not known"):
        patcher.undo()
    patcher.commit()
    kernels.late = True
    with pytest.raises(IntegrityError, match="tensor 'b'"):
        patcher.undo()


def test_forwards_beside_a_commit_compute_with_the_old_weights_or_the_new(lag):
    """What was queued before it on the engine's stream reads the old ones, however late; and so on the way back."""
    generator, old = torch.Generator().manual_seed(4), state(1)
    new = {name: patched_copy(tensor, 0.05, generator) for name, tensor in old.items()}
    change, engine = step(old, new), torch.Stream(lag)
    with engine:
        live = {name: tensor.to(lag) for name, tensor in old.items()}
        patcher = Patcher(identity(live))

    def forward():
        return {name: as_bits(tensor).sum(0) for name, tensor in live.items()}

    def staged():
        with torch.Stream(lag):
            compare(patcher.stage(change), change.digests)

    for _ in range(3):
        with engine:
            before = [forward() for _ in range(4)]
            staging = in_thread(staged, "stage")
            before += [forward() for _ in range(4)]
            staging.result(WAIT_S)
            before += [forward() for _ in range(4)]
            patcher.commit()
            after = [forward() for _ in range(2)]
            patcher.undo()
            for found, held in ((before, old), (after, new), ([forward()], old)):
                for row in found:
                    assert all(torch.equal(row[name].cpu(), as_bits(one).sum(0)) for name, one in held.items())


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


METAS = [ParamMeta(name, torch.float32, shape) for name, shape in SIZES.items()]


def test_every_written_element_is_counted_fills_included():
    model = Engine(lambda shape: meta(*shape), 1, 2)
    placement = record(model.load_weights, METAS, model.params)
    assert placement.written == {name: one.numel() for name, one in model.params.items()}
    assert placement.sources("qkv") == ("q", "k", "v") and placement.nowhere() == ()
    assert record(model.load_weights, METAS[:1], model.params).written["qkv"] == 24
    assert record(lambda pairs: list(pairs), METAS[:2], {"p": meta(2)}).nowhere() == ("q", "k")


@pytest.mark.parametrize(
    ("param", "words"),
    [
        (ParamMeta("stranger", torch.float32, (1,)), r"stranger float32.*KeyError"),
        (ParamMeta("norm", torch.float32, (1,)), "another shape"),  # which would broadcast
    ],
)
def test_tensors_that_a_loader_does_not_take_are_refused(param, words):
    model = Engine(lambda shape: meta(*shape), 0, 1)
    with pytest.raises(ManifestError, match=words):
        record(model.load_weights, [param], model.params)


def test_computed_values_are_attributed_and_marked():
    target = {"stack": meta(2, 3), "scale": meta(1)}

    def load(pairs):
        held = dict(pairs)
        target["stack"].copy_(torch.stack([held["a"], held["b"] * 2]))
        target["scale"].fill_(held["s"].item())

    params = [ParamMeta(name, torch.float32, (3,)) for name in "ab"] + [ParamMeta("s", torch.float32, ())]
    placement = record(load, params, target)
    assert [landing.exact for name in "abs" for landing in placement.landings[name]] == [False] * 3
    assert placement.sources("stack") == ("a", "b") and placement.sources("scale") == ("s",)


@pytest.mark.parametrize(
    ("source", "target", "kept"),
    [
        (torch.bfloat16, torch.float32, True),
        (torch.float16, torch.float32, True),
        (torch.float32, torch.bfloat16, False),
        (torch.float16, torch.bfloat16, False),
        (torch.bfloat16, torch.float16, False),
        (torch.int8, torch.float32, False),
        (torch.int8, torch.int32, True),
        (torch.bool, torch.int8, False),
        (torch.float8_e4m3fn, torch.float8_e4m3fn, True),
    ],
)
def test_a_cast_is_lossy_only_where_values_are_lost(source, target, kept):
    own = {"p": meta(4, dtype=target)}
    placement = record(
        lambda pairs: [own["p"].copy_(tensor) for _, tensor in pairs], [ParamMeta("w", source, (4,))], own
    )
    lossy = [] if kept else [("w", "p")]
    assert [(param.name, landing.param) for param, landing in placement.lossy()] == lossy


def test_a_live_copy_that_a_layer_derives_keeps_its_values():
    """As SGLang's latent attention, which computes with a part of a weight that it copies after loading."""
    weight, derived = meta(4, 6), torch.ones(2, 6)

    def load(pairs):
        for _, tensor in pairs:
            weight.copy_(tensor)
        derived.copy_(weight[:2] * 2)

    placement = record(load, [ParamMeta("w", torch.float32, (4, 6))], {"weight": weight})
    assert [landing.param for landing in placement.landings["w"]] == ["weight"]
    assert torch.equal(derived, torch.ones(2, 6))


@pytest.mark.parametrize("spread", [lambda tensor: tensor.expand(4, 3), lambda tensor: tensor.unfold(0, 2, 1)])
def test_copy_to_several_places_is_not_an_exact_landing(spread):
    source = ParamMeta("scale", torch.float32, (3,))
    target = meta(*spread(torch.empty(3)).shape)
    placement = record(lambda pairs: [target.copy_(spread(tensor)) for _, tensor in pairs], [source], {"own": target})
    (landing,) = placement.landings["scale"]
    assert not landing.exact and landing.param == "own" and placement.written["own"] == target.numel()
