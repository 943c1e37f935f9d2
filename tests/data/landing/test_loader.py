"""How weights land in modules, TensorDicts and mappings: each name of an update, or none."""

import pytest
import torch
from torch import nn

import torchrl_ext as tx
from tests.data.deltas.data import Listed
from torchrl_ext.base.errors import ConfigError, ManifestError, UpdateError
from torchrl_ext.data.landing.loader import TensorsLoader, as_loader
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.sync.local.inprocess import InProcessEngine


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"weight": torch.zeros(3, 2)}, "missing from the update, first 'bias'.*Next: register"),
        ({"weight": torch.zeros(3, 2), "bias": torch.zeros(3), "x": torch.zeros(1)}, "no parameter 'x'"),
        ({"weight": torch.zeros(3, 2), "actor.bias": torch.zeros(3)}, "such as 'bias'.*mapper"),
        ({"wieght": torch.zeros(3, 2), "bias": torch.zeros(3)}, "such as 'weight'.*mapper"),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(3)}, r"'weight' arrives as float32\[2, 3\]\. .*Next: start"),
        (
            {"weight": torch.zeros(3, 2), "bias": torch.zeros(3).half()},
            "'bias' arrives as float16.*WeightSender dtype=torch.float32, .* --dtype float32",
        ),
    ],
)
def test_what_cannot_land_is_named_before_anything_is_touched(params, said):
    with pytest.raises(ManifestError, match=said):
        as_loader(nn.Linear(2, 3)).check(as_source(params).params())


@pytest.mark.parametrize(
    ("buffer", "said"),
    [
        (torch.rand(1).expand(4), "share memory"),
        (torch.rand(6).as_strided((3, 2), (1, 1)), "share memory"),
        (torch.rand(4, device="meta"), "meta device"),
    ],
)
def test_what_cannot_be_written_is_named_before_the_pause(buffer, said, tmp_path):
    model = nn.Linear(2, 3)
    model.register_buffer("mask", buffer)
    before, sent = model.weight.clone(), {"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}
    engine = InProcessEngine(model)
    with tx.WeightSender(tx.DiskTransport(tmp_path), engine) as sender:
        with pytest.raises(UpdateError, match=f"'mask'.*{said}"):
            sender.update_weights(sent | {"mask": torch.rand(buffer.shape)})
        assert torch.equal(model.weight, before) and engine.serving.is_set()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_model_of_several_dtypes_takes_what_the_hint_says(dtype, tmp_path):
    trainer, model = nn.Linear(2, 3), nn.Linear(2, 3)
    model.weight = nn.Parameter(model.weight.detach().bfloat16())
    sender = tx.WeightSender(tx.DiskTransport(tmp_path), InProcessEngine(model), dtype=dtype)
    with sender, pytest.raises(UpdateError, match=r"leave dtype= out, .*update_weights\({name: tensor.to"):
        sender.update_weights(trainer)
    own = {"weight": torch.bfloat16, "bias": torch.float32}
    with tx.WeightSender(tx.DiskTransport(tmp_path), InProcessEngine(model)) as sender:
        sender.update_weights({name: tensor.to(own[name]) for name, tensor in trainer.state_dict().items()})
    assert torch.equal(model.weight, trainer.weight.bfloat16()) and torch.equal(model.bias, trainer.bias)


def test_a_loader_stays_as_it_is_and_other_things_are_refused():
    loader = TensorsLoader({})
    assert as_loader(loader) is loader
    with pytest.raises(ConfigError, match="cannot be loaded into a list"):
        as_loader([])


class Policy(nn.Module):
    """A tied pair of weights, and a buffer that is not persistent."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(3), persistent=False)


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_tied_tensor_and_non_persistent_buffer_land_in_place(tmp_path, name):
    own, theirs = Policy(0), Policy(1)
    sender = tx.WeightSender(tx.DeltaTransport(tmp_path), InProcessEngine(theirs))
    for step in range(3):
        own.embed.weight.data[step] += 1.0
        own.scale[step] = 7.0 + step
        report = sender.update_weights({name: own.embed.weight.detach(), "scale": own.scale})
        assert report.proof == "in place" and torch.equal(theirs.scale, own.scale)
        assert torch.equal(theirs.head.weight, own.embed.weight)


def test_a_change_of_a_name_that_was_not_checked_is_refused():
    loader = TensorsLoader(Policy(0))
    changes = Listed(digests=dict.fromkeys(("embed.weight", "stranger"), "0" * 32))
    with pytest.raises(ManifestError, match="stranger"):
        loader.stage(changes)
