"""`transformers` modules are sent, and take weights, under the names of their checkpoints."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict

import torchrl_ext as tx
from tests.data.transports.chains import same
from tests.models import CONVERTED, converted_model, tiny_model
from torchrl_ext.base.errors import ManifestError, UpdateError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.landing.loader import as_loader
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.data.weights.digests import position_digest
from torchrl_ext.data.weights.source import ModuleSource, checked, named_tensors
from torchrl_ext.rl.worker_end import ModelLoader
from torchrl_ext.sync.local.inprocess import InProcessEngine
from torchrl_ext.testing import same_bits

STACKED = "model.layers.1.mlp.experts.gate_up_proj"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


def saved(model, folder):
    """What `save_pretrained` writes."""
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def own(model):
    """The live tensors under the names of the module."""
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def converted(model):
    return dict(as_source(model))


def mixed(model):
    """The last layer as the module has it, all others as the checkpoint has them."""
    layers = {name: ".layers.1." in name for name in own(model) | converted(model)}
    return {name: one for name, one in own(model).items() if layers[name]} | {
        name: one for name, one in converted(model).items() if not layers[name]
    }


def change(model, seed=7):
    """Change a few elements of every parameter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            flat[torch.randint(flat.numel(), (3,), generator=generator)] += 1.0


# sending


@pytest.mark.parametrize("kind", [*CONVERTED, "hrm_text", "dinov2"])
def test_the_source_is_what_save_pretrained_writes(kind, tmp_path):
    model = converted_model(kind)
    source = as_source(model)
    for _ in range(2):
        assert same({meta.name: tensor for meta, tensor in checked(source)}, saved(model, tmp_path / "saved"))
        change(model)  # what was found out about the structure is kept, and the values are those of now


def test_a_layer_stays_together_and_tied_tensors_travel_once():
    model = converted_model("mixtral", tie_word_embeddings=True)
    names = [meta.name for meta in as_source(model).params()]
    layers = [name.split(".")[2] for name in names if ".layers." in name]
    assert layers == sorted(layers)
    assert "lm_head.weight" not in names and "model.embed_tokens.weight" in names


def test_reversible_conversions_are_undone_and_others_warn(tmp_path, caplog):
    from transformers.core_model_loading import ConversionOps, WeightConverter

    class Doubled(ConversionOps):
        """Its reversal writes into memory that it made."""

        def convert(self, input_dict, source_patterns, target_patterns, **_):
            ((tensor,),) = input_dict.values()
            made = torch.empty_like(tensor)
            made.copy_(tensor)
            made[0] = tensor[0]
            return {target_patterns[0]: made.mul_(2)}

        @property
        def reverse_op(self):
            return self

    class OneWay(Doubled):
        @property
        def reverse_op(self):
            raise NotImplementedError("there is no way back")

    for op in (Doubled(), OneWay()):
        model = tiny_model()
        model._weight_conversions = [WeightConverter("norm.scaled", "model.norm.weight", [op])]
        found = {meta.name: tensor for meta, tensor in checked(as_source(model))}
        if isinstance(op, OneWay):
            assert same(found, own(model)) and "there is no way back" in caplog.text
        else:
            assert same(found, saved(model, tmp_path / "saved"))


# receiving


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_an_update_lands_in_the_parameters_that_are_there(kind, tmp_path):
    sent, held = converted_model(kind, 1), converted_model(kind, 2)
    parameters = [(id(parameter), parameter.data_ptr()) for parameter in held.parameters()]
    sender = tx.WeightSender(tx.DeltaTransport(tmp_path, keep_files=True), InProcessEngine(held))
    sender.register_model(sent)
    for weights_of in (lambda model: None, TensorDict.from_module, own, converted, mixed):
        assert sender.update_weights(weights_of(sent)).verified  # read back under these names
        assert same(own(held), own(sent))
        change(sent)
    assert parameters == [(id(parameter), parameter.data_ptr()) for parameter in held.parameters()]
    published = {meta.name for meta in as_source(tmp_path / "weight_v000001").params()}
    assert published >= {meta.name for meta in as_source(sent).params()}
    sender.shutdown()


def test_what_does_not_cover_the_model_is_refused_by_name():
    """The loader's names stay those of the last update that covers it."""
    model = converted_model("qwen3_moe")
    whole = {meta.name: meta for meta in as_source(model).params()}
    loader = as_loader(model)
    with pytest.raises(ManifestError, match=f"1 parameters of the model are missing.*'{EXPERT}'"):
        loader.check(meta for name, meta in whole.items() if name != EXPERT)
    stacked = {meta.name: meta for meta in ModuleSource(model).params()}
    loader.check(stacked.values())
    with pytest.raises(ManifestError, match=f"1 parameters of the model are missing.*'{STACKED}'"):
        loader.check(meta for name, meta in stacked.items() if name != STACKED)
    with pytest.raises(ManifestError, match=r"no parameter '.*\.experts\."):  # they come as stacked, too
        loader.check([*whole.values(), stacked[STACKED]])
    with pytest.raises(ManifestError, match=r"no parameter 'model\.x'"):
        loader.check([*whole.values(), ParamMeta("model.x", torch.float32, (1,))])
    with pytest.raises(ManifestError, match=f"'{EXPERT}' arrives as"):
        loader.check([*(whole | {EXPERT: ParamMeta(EXPERT, torch.float32, (16, 8))}).values()])
    assert STACKED in loader.digests() and EXPERT not in loader.digests()


def test_what_joins_tensors_of_the_model_lands_under_its_own_names():
    sent, held = converted_model("hrm_text", 1), converted_model("hrm_text", 2)
    with tx.WeightSender(tx.MemoryTransport(), InProcessEngine(held)) as sender:
        with pytest.raises(UpdateError, match=r"gqkv_proj.weight' is made of several .*k_proj.*Next: send module"):
            sender.update_weights(sent)
        assert sender.update_weights(sent.state_dict()).verified and same(own(held), own(sent))


def test_meta_policy_gets_storage_and_ties_from_checkpoint():
    for kind in ("mixtral", "qwen2_5_vl"):
        sent = converted_model(kind, 1, tie_word_embeddings=True)
        held = converted_model(kind, 2, tie_word_embeddings=True).to("meta")
        loader = ModelLoader(lambda held=held: held, device="cpu", tied=dict(as_source(sent).tied()))
        received = [(name, tensor.clone()) for name, tensor in as_source(sent)]
        received += [(name, buffer) for name, buffer in named_tensors(sent, scratch=True) if "inv_freq" in name]
        loader.check(ParamMeta.of(*pair) for pair in received)
        loader.load(received)
        loader.finish()
        assert same(own(held), own(sent))
        assert held.get_input_embeddings().weight is held.get_output_embeddings().weight
        expected = {name: position_digest(tensor).hex() for name, tensor in as_source(sent)}
        assert expected.items() <= loader.digests().items()


# mappings


def test_partial_mapping_uses_checkpoint_names_where_complete():
    sender, policy = tx.WeightSender(tx.MemoryTransport()), converted_model("qwen3_moe")
    sender.register_model(policy)
    some = {name: tensor for name, tensor in own(policy).items() if name in (STACKED, "model.norm.weight")}
    found = dict(sender._source(some | {"extra": torch.zeros(1)}))
    assert len(found) == 2 + 8 and same_bits(found[EXPERT], some[STACKED][2, 8:])
    with pytest.raises(ManifestError, match="given twice"):
        sender._source(some | {EXPERT: found[EXPERT]})
