"""A worker whose output head has no memory of its own, or whose engine puts parameters into other memory."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import torchrl_ext as tx
from tests.data.deltas.data import Listed
from tests.engines import processed
from tests.sync.ends import digests, made
from torchrl_ext.base import messages
from torchrl_ext.base.errors import ManifestError, StaleBaseError, UpdateError
from torchrl_ext.base.messages import Finish
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.engines.loader import EngineLoader
from torchrl_ext.engines.rehearsal import changed, reverting_changes
from torchrl_ext.sync.local.inprocess import InProcessEngine

SHAPE = 6, 4


class Net(nn.Module):
    """An embedding under a name of its own, and a head that is the same parameter.

    ``form`` is ``"plain"``; ``"packed"``, which cannot be read back; or ``"written over"``: a head that comes is
    written over the embedding, and otherwise passed over.
    """

    def __init__(self, form):
        super().__init__()
        self.words, self.lm_head = nn.Embedding(*SHAPE), nn.Linear(*SHAPE[::-1], bias=False)
        self.lm_head.weight, self.form = self.words.weight, form

    def load_weights(self, pairs):
        for name, tensor in pairs:
            if name == "words.weight" or self.form == "written over":
                self.get_parameter(name).data.copy_(tensor)


class Tied(processed.Unprocessed):
    tied = True

    @property
    def copied(self):
        return [self.module.words.weight.data_ptr()] if self.module.form == "packed" else []


def weights(head=0.0, seed=0):
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    return {"lm_head.weight": values + head, "words.weight": values.clone()}


@pytest.fixture(params=["plain", "packed", "written over"])
def model(request, tmp_path):
    start = {"words.weight": weights()["words.weight"]}
    save_file(start, tmp_path / "model.safetensors")
    net = Net(request.param)
    net.load_weights(start.items())
    return Tied(net, tmp_path)


@pytest.mark.parametrize("transport", ["memory", "disk", "delta"])
def test_a_head_that_lands_nowhere_has_to_equal_its_embedding(model, transport, tmp_path):
    engine, net = InProcessEngine(tx.WeightReceiver(EngineLoader(model))), model.module
    with tx.WeightSender(made(transport, tmp_path / "root"), engine) as sender:
        for version in range(1, 3):
            before = net.words.weight.clone()
            with pytest.raises(UpdateError, match="one memory"):
                sender.update_weights(weights(head=1, seed=version))
            assert torch.equal(net.words.weight, before)
            assert engine.serving.is_set()
            sender.update_weights(weights(seed=version))
            assert torch.equal(net.lm_head.weight, weights(seed=version)["words.weight"])


def test_a_finish_that_comes_twice_has_one_answer(model, tmp_path):
    """A client of several servers hears one of them at a time."""
    receiver = tx.WeightReceiver(EngineLoader(model))
    with tx.WeightSender(made("delta", tmp_path / "root"), InProcessEngine(receiver)) as sender:
        sender.update_weights(weights(seed=1))
        answers = [receiver.handle(Finish(version=1, connection=receiver.connection)) for _ in range(2)]
        assert answers[0] == answers[1] and answers[0]["digest"]


@pytest.fixture
def loader(model):
    found = EngineLoader(model)
    found.check(ParamMeta.of(*pair) for pair in weights().items())
    found.compare_start()
    return found


def test_a_worker_never_holds_a_head_that_was_only_handed_over(loader):
    loader.start()
    with pytest.raises(ManifestError, match="one memory"):
        loader.load(weights(head=1).items())
    assert not loader.digests().items() >= digests(weights(head=1)).items()
    loader.start()
    loader.load(weights().items())
    loader.finish()
    assert loader.digests() == digests(weights())


def test_changes_that_untie_head_and_embedding_are_not_staged(loader, model):
    before = model.module.words.weight.clone()
    with pytest.raises(ManifestError, match="one memory"):
        loader.stage(Listed(digests=digests(weights(head=1))))
    assert torch.equal(model.module.words.weight, before)


def test_a_part_without_the_embedding_of_its_head_is_refused(loader):
    with pytest.raises(ManifestError, match=r"lacks 'words\.weight'"):
        loader.part(frozenset({"lm_head.weight"}))
    loader.part(frozenset(weights()))


def test_a_head_whose_embedding_is_unknown_is_refused(tmp_path):
    net = Net("plain")
    net.lm_head = nn.Linear(*SHAPE[::-1], bias=False)
    with pytest.raises(ManifestError, match=r"no parameter 'lm_head\.weight'"):
        EngineLoader(Tied(net, tmp_path)).check(ParamMeta.of(*pair) for pair in weights().items())


class TestReplacedMemory:
    """An engine that puts a parameter into other memory between two updates."""

    @pytest.mark.parametrize(
        ("told", "transport"), [(False, "memory"), (False, "disk"), (False, "delta"), (True, "delta")]
    )
    def test_the_next_update_lands_in_what_the_model_computes_with(self, transport, told, tmp_path):
        loader = processed.processed(tmp_path)
        module = loader.model.module
        receiver = tx.WeightReceiver(loader)
        with tx.WeightSender(made(transport, tmp_path / "root"), InProcessEngine(receiver)) as sender:
            for seed in range(1, 4):
                if seed > 1:
                    layer = module.blocks[0]["Fused"]
                    layer.weight = nn.Parameter(layer.weight.data.clone(), requires_grad=False)
                    if told:
                        receiver.handle(messages.Reset(weights="reloaded"))
                report = sender.update_weights(processed.checkpoint(seed))
                assert report.verified
                assert torch.equal(module(processed.PROBE), processed.outputs(processed.checkpoint(seed)))

    def test_staged_changes_are_not_written_to_replaced_memory(self, tmp_path):
        loader, start = processed.processed(tmp_path), processed.checkpoint(0)
        layer = loader.model.module.blocks[0]["Fused"]
        loader.check(ParamMeta.of(*pair) for pair in start.items())
        loader.start()
        loader.load((name, changed(name, tensor)) for name, tensor in start.items())
        loader.finish()
        loader.stage(reverting_changes(start.items, digests(start), loader.patchable))
        given_up, before = layer.weight, layer.weight.clone()
        layer.weight = nn.Parameter(given_up.data.clone(), requires_grad=False)
        with pytest.raises(StaleBaseError):
            loader.commit()
        assert torch.equal(layer.weight, before) and torch.equal(given_up, before)
        loader.stage(reverting_changes(start.items, digests(start), loader.patchable))
        loader.commit()
        assert torch.equal(loader.model.module(processed.PROBE), processed.outputs(start))
