"""What a Megatron rank holds of a checkpoint, held against tensors that are sharded by hand, from the full ones."""

from __future__ import annotations

import inspect
import json
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import torchrl_ext as tx
from tests.ranks import on_ranks
from tests.weights.shards.ranks import require_assembled
from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.sources.megatron.families import Architecture, config_of
from torchrl_ext.sources.megatron.source import MegatronSource
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.checkpoint import CheckpointSource

SIZES = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [1]}
CONFIGS = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "mixtral": {"num_local_experts": 4},
    "qwen2": {"head_dim": None},
    "qwen2_moe": {**MIXTURE, "shared_expert_intermediate_size": 12, "head_dim": None},
    "qwen3": {},
    "qwen3_moe": MIXTURE,
}
LAYERS = {  # as Megatron's own comments draw them: of each stage the layers of its chunks
    "one": [[[0, 1, 2, 3]]],
    "two": [[[0, 1]], [[2, 3]]],
    "interleaved": [[[0], [2]], [[1], [3]]],
    "uneven": [[[0]], [[1, 2, 3]]],
    "apart": [[[]], [[0, 1, 2, 3]], [[]]],
    "uneven chunks": [[[0], [2, 3]], [[1], []]],
}


def config(family, **changes):
    found = {"model_type": family, **SIZES, **CONFIGS.get(family, {}), **changes}
    return {key: value for key, value in found.items() if value is not None}


def full_tensors(config):
    """Random tensors under the names and in the shapes of the checkpoint."""
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in Architecture.of(config).shapes.items()}


# the reference: what a Megatron rank would hold, made from the full tensors


def part(tensor, ranks, dim=0):
    return tensor.chunk(ranks[0], dim)[ranks[1]].clone()


def fused_qkv(q, k, v, config):
    """[q q .. k v] of the first group, then of the second, and so on."""
    groups = config["num_key_value_heads"]
    return torch.cat([one[g] for g in range(groups) for one in (x.chunk(groups) for x in (q, k, v))])


def gate_and_up(gate, up, ranks):
    return torch.cat([part(gate, ranks), part(up, ranks)])


def padded(tensor, ranks):
    """The vocabulary of 37 in multiples of 16 times the ranks: the last of four ranks has padding alone."""
    size = -(-len(tensor) // (16 * ranks[0])) * 16 * ranks[0]
    return part(torch.cat([tensor, torch.full((size - len(tensor), tensor.shape[1]), 9.0)]), ranks)


def hand_sharded(full, config, *, tp=(1, 0), ep=(1, 0), etp=(1, 0), layers, first, last, experts="te", fused=True):
    """A chunk's state dict, with ``layers`` of the model."""
    tied, held = config["tie_word_embeddings"], {}
    if first:
        held["embedding.word_embeddings.weight"] = padded(full["model.embed_tokens.weight"], tp)
    for local, layer in enumerate(layers):
        here, there = f"decoder.layers.{local}.", f"model.layers.{layer}."
        own = {name.removeprefix(there): tensor for name, tensor in full.items() if name.startswith(there)}
        routed = any("experts." in name for name in own)
        norms = (
            ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
            if fused and not routed
            else ("input_layernorm.weight", "pre_mlp_layernorm.weight")
        )
        held[here + norms[0]] = own["input_layernorm.weight"].clone()
        held[here + norms[1]] = own["post_attention_layernorm.weight"].clone()
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in own:
                q, k, v = (own[f"self_attn.{x}_proj.{kind}"] for x in "qkv")
                held[f"{here}self_attention.linear_qkv.{kind}"] = part(fused_qkv(q, k, v, config), tp)
        held[f"{here}self_attention.linear_proj.weight"] = part(own["self_attn.o_proj.weight"], tp, 1)
        if "self_attn.o_proj.bias" in own:
            held[f"{here}self_attention.linear_proj.bias"] = own["self_attn.o_proj.bias"].clone()
        for x in "qk":
            if f"self_attn.{x}_norm.weight" in own:
                held[f"{here}self_attention.{x}_layernorm.weight"] = own[f"self_attn.{x}_norm.weight"].clone()
        if not routed:
            for kind in ("weight", "bias"):
                if f"mlp.gate_proj.{kind}" in own:
                    gate, up = own[f"mlp.gate_proj.{kind}"], own[f"mlp.up_proj.{kind}"]
                    held[f"{here}mlp.linear_fc1.{kind}"] = gate_and_up(gate, up, tp)
            held[f"{here}mlp.linear_fc2.weight"] = part(own["mlp.down_proj.weight"], tp, 1)
            if "mlp.down_proj.bias" in own:
                held[f"{here}mlp.linear_fc2.bias"] = own["mlp.down_proj.bias"].clone()
            continue
        block, names = "mlp", ("gate_proj", "up_proj", "down_proj")
        if config["model_type"] == "mixtral":
            block, names = "block_sparse_moe", ("w1", "w3", "w2")
        held[f"{here}mlp.router.weight"] = own[f"{block}.gate.weight"].clone()
        mine = torch.arange(4).chunk(ep[0])[ep[1]].tolist()
        fc1, fc2 = [], []
        for expert in mine:
            gate, up, down = (own[f"{block}.experts.{expert}.{name}.weight"] for name in names)
            fc1.append(gate_and_up(gate, up, etp))
            fc2.append(part(down, etp, 1))
        to = f"{here}mlp.experts."
        for index, (one, two) in enumerate(zip(fc1, fc2, strict=True)):
            if experts == "te":
                held[f"{to}linear_fc1.weight{index}"], held[f"{to}linear_fc2.weight{index}"] = one, two
            elif experts == "sequential":
                held[f"{to}local_experts.{index}.linear_fc1.weight"] = one
                held[f"{to}local_experts.{index}.linear_fc2.weight"] = two
        if experts == "stacked":  # Megatron reads [hidden, experts * 2 ffn] as [experts, hidden, 2 ffn]
            held[f"{to}weight1"] = torch.stack([one.t() for one in fc1]).reshape(16, -1)
            held[f"{to}weight2"] = torch.stack([two.t() for two in fc2]).reshape(-1, 16)
        if "mlp.shared_expert_gate.weight" in own:
            gate, up, down = (own[f"mlp.shared_expert.{name}.weight"] for name in names)
            held[f"{here}mlp.shared_experts.linear_fc1.weight"] = gate_and_up(gate, up, tp)
            held[f"{here}mlp.shared_experts.linear_fc2.weight"] = part(down, tp, 1)
            held[f"{here}mlp.shared_experts.gate_weight"] = own["mlp.shared_expert_gate.weight"].clone()
    if last:
        held["decoder.final_layernorm.weight"] = full["model.norm.weight"].clone()
        if not (tied and first):  # a last stage that is not the first has a copy of a tied embedding
            held["output_layer.weight"] = padded(full["model.embed_tokens.weight" if tied else "lm_head.weight"], tp)
    return held


def ranks_of(full, config, *, tp=1, ep=1, etp=1, pipeline="one", **how):
    """Of every rank, as Megatron numbers them: its chunks, and the arguments of its source."""
    stages = LAYERS[pipeline]
    for stage, chunks in enumerate(stages):
        for rank in range(max(tp, etp * ep)):
            at = {"tp": (tp, rank % tp), "etp": (etp, rank % etp), "ep": (ep, rank // etp % ep)}
            held = [
                hand_sharded(
                    full,
                    config,
                    layers=layers,
                    first=stage == number == 0,
                    last=(stage, number) == (len(stages) - 1, len(chunks) - 1),
                    **at,
                    **how,
                )
                for number, layers in enumerate(chunks)
            ]
            settings = {"pp_size": len(stages), "pp_rank": stage}
            for kind, (size, own) in at.items():
                settings |= {f"{kind}_size": size, f"{kind}_rank": own}
            if pipeline not in ("one", "two", "interleaved"):
                settings["layers"] = [[len(layers) for layers in chunks] for chunks in stages]
            yield held, settings


def addresses(held):
    return {tensor.untyped_storage().data_ptr() for chunk in held for tensor in chunk.values()}


def source_of(held, config, settings):
    return MegatronSource(held[0] if len(held) == 1 else held, config, **settings)


LAYOUTS = [
    ("qwen3", {}, {}),
    ("qwen3", {}, {"tp": 2, "pipeline": "two", "fused": False}),
    ("qwen3", {}, {"tp": 4}),  # more ranks than groups, and one that has padding alone
    ("qwen3", {}, {"tp": 2, "pipeline": "interleaved"}),
    ("qwen3", {}, {"pipeline": "uneven"}),
    ("qwen3", {}, {"pipeline": "apart"}),
    ("qwen3", {}, {"pipeline": "uneven chunks"}),
    ("qwen3", {"tie_word_embeddings": True}, {"tp": 2}),
    ("qwen3", {"tie_word_embeddings": True}, {"tp": 2, "pipeline": "two"}),
    ("qwen3", {"attention_bias": True}, {"tp": 4}),
    ("qwen3", {"num_attention_heads": 6}, {"tp": 4}),  # a cut through a head
    ("qwen2", {}, {"tp": 2}),
    ("llama", {}, {"tp": 4, "pipeline": "two"}),
    ("mistral", {"head_dim": None, "num_key_value_heads": 4}, {"tp": 2}),
    ("qwen3_moe", {}, {"tp": 2, "ep": 2, "etp": 2, "pipeline": "two"}),
    ("qwen3_moe", {}, {"tp": 4, "ep": 4, "experts": "sequential"}),
    ("qwen3_moe", {}, {"tp": 2, "ep": 2, "etp": 2, "experts": "stacked"}),
    ("qwen3_moe", {}, {"tp": 1, "ep": 4, "experts": "stacked", "pipeline": "interleaved"}),
    ("qwen3_moe", {"decoder_sparse_step": 2}, {"ep": 2}),
    ("qwen2_moe", {}, {"tp": 4, "ep": 2, "etp": 2}),
    ("mixtral", {}, {"tp": 2, "etp": 4, "ep": 2, "experts": "sequential"}),
]


@pytest.mark.parametrize(("family", "changes", "layout"), LAYOUTS, ids=str)
def test_the_shards_of_all_ranks_are_the_checkpoint(family, changes, layout):
    settings = config(family, **changes)
    full = full_tensors(settings)
    blocks = {name: set() for name in full}
    for held, place in ranks_of(full, settings, **layout):
        source, memory, order = source_of(held, settings, place), addresses(held), []
        assert source.params() == tuple(ParamMeta.of(*pair) for pair in full.items())
        for shard in source.shards():
            name, tensor = shard.meta.name, shard.take()
            assert tensor.shape == shard.block.shape and not shard.gathers and tensor.numel()
            assert tensor.untyped_storage().data_ptr() in memory, f"{name} is a copy"
            assert torch.equal(tensor, full[name][tuple(map(slice, *shard.block))]), (name, shard.block)
            blocks[name].add(shard.block)
            order.append(name)
        assert order == sorted(order, key=list(full).index)
    for name, tensor in full.items():  # the same block on two ranks is a replica; others do not overlap
        held_by = torch.zeros(tensor.shape)
        for block in blocks[name]:
            held_by[tuple(map(slice, *block))] += 1
        assert torch.equal(held_by, torch.ones(tensor.shape)), name


@pytest.mark.parametrize("family", [*CONFIGS, "granite", "seed_oss"])
def test_names_and_shapes_are_those_that_transformers_saves(family, tmp_path):
    settings = config(family)
    made = transformers.AutoConfig.for_model(**settings)
    transformers.AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path)
    wanted = {meta.name: meta.shape for meta in CheckpointSource(tmp_path).params()}
    for form in (settings, made, SimpleNamespace(**settings), tmp_path):
        assert dict(Architecture.of(config_of(form)).shapes) == wanted


def test_a_checkpoint_on_disk_has_the_files_beside_the_config(tmp_path):
    settings = config("qwen3")
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer.json").write_text("{}")
    [(held, place)] = ranks_of(full_tensors(settings), settings)
    for path in (tmp_path, str(tmp_path / "config.json")):
        assert set(source_of(held, path, place).files()) == {"config.json", "tokenizer.json"}
    assert json.loads(source_of(held, settings, place).files()["config.json"]) == settings


# Megatron's modules and parallel state


def module_of(held, layers):
    """A module with these tensors, as Megatron wraps and names them; its layers know their number, from 1."""
    root = nn.Module()
    for name, tensor in held.items():
        module, (*path, leaf) = root, f"module.module.{name}".split(".")
        for step in path:
            if step not in dict(module.named_children()):
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        module.register_parameter(leaf, nn.Parameter(tensor))
    for local, layer in enumerate(layers):
        root.get_submodule(f"module.module.decoder.layers.{local}").layer_number = layer + 1
    root.get_submodule("module.module").register_buffer("local_tokens", torch.zeros(3), persistent=False)
    return root


def test_modules_say_which_layers_they_are():
    settings = config("qwen3")
    full = full_tensors(settings)
    stages = LAYERS["uneven chunks"]
    for (held, place), chunks in zip(ranks_of(full, settings, pipeline="uneven chunks"), stages, strict=True):
        wanted = [(shard.meta, shard.block) for shard in source_of(held, settings, place).shards()]
        modules = [module_of(tensors, layers) for tensors, layers in zip(held, chunks, strict=True)]
        del place["layers"]
        shards = list(MegatronSource(modules, settings, **place).shards())
        assert [(shard.meta, shard.block) for shard in shards] == wanted
        assert not any(shard.take().requires_grad for shard in shards)
    with pytest.raises(ConfigError, match=r"are the layers \[1\] of the model.*\[1, 2\].*check `layers`"):
        MegatronSource(modules, settings, **place, layers=[[1, 0], [2, 1]])


def parallel_state(**sizes):
    kinds = {"tp": "tensor_model", "pp": "pipeline_model", "ep": "expert_model", "etp": "expert_tensor"}
    found = {"get_virtual_pipeline_model_parallel_world_size": lambda: sizes.get("vpp")}
    for short, kind in kinds.items():
        if short in sizes:
            for what, value in zip(("world_size", "rank"), sizes[short], strict=True):
                found[f"get_{kind}_parallel_{what}"] = lambda value=value: value
    return SimpleNamespace(**found)


def test_ranks_are_read_from_the_parallel_state():
    settings = config("qwen3_moe")
    full = full_tensors(settings)
    for held, place in ranks_of(full, settings, tp=2, ep=2, etp=1, pipeline="interleaved"):
        wanted = [(shard.meta, shard.block) for shard in source_of(held, settings, place).shards()]
        at = {kind: (place[f"{kind}_size"], place[f"{kind}_rank"]) for kind in ("tp", "pp", "ep", "etp")}
        source = tx.MegatronSource.from_parallel_state(held, settings, parallel_state(**at, vpp=2))
        assert [(shard.meta, shard.block) for shard in source.shards()] == wanted
    older = parallel_state(tp=(2, 0), pp=(1, 0), ep=(0, 0))  # which knows no groups of experts
    (chunk,), _ = next(ranks_of(full, settings, tp=2, etp=2))
    assert list(tx.MegatronSource.from_parallel_state(chunk, settings, older).shards())
    with pytest.raises(ConfigError, match=r"1 model chunk\(s\), and 2 virtual pipeline stage\(s\)"):
        tx.MegatronSource.from_parallel_state(held[0], settings, parallel_state(**at, vpp=2))


# further tensors, and what is left out


def test_further_tensors_are_named_by_the_caller():
    settings = config("qwen3_moe", mlp_only_layers=[])
    biases, heads = torch.randn(4, 4), torch.randn(4, 16)
    names = {
        "decoder.layers.{layer}.mlp.router.expert_bias": ("model.layers.{layer}.mlp.gate.bias", (4,), None),
        "value_head.weight": ("value.weight", (4, 16), 0),
    }
    found = {}
    for held, place in ranks_of(full_tensors(settings), settings, tp=2, etp=2, pipeline="two"):
        first, last = ((0, 1), (2, 3))[place["pp_rank"]], place["pp_rank"] == 1
        for local, layer in enumerate(first):
            held[0][f"decoder.layers.{local}.mlp.router.expert_bias"] = biases[layer]
        if last:
            held[0]["module.value_head.weight"] = part(heads, (2, place["tp_rank"]))
        source = source_of(held, settings, place | {"names": names})
        assert source.params()[-5:] == (
            *(ParamMeta(f"model.layers.{layer}.mlp.gate.bias", torch.float32, (4,)) for layer in range(4)),
            ParamMeta("value.weight", torch.float32, (4, 16)),
        )
        for shard in source.shards():
            found.setdefault(shard.meta.name, {})[shard.block] = shard.take()
    for layer in range(4):
        [bias] = found[f"model.layers.{layer}.mlp.gate.bias"].values()
        assert torch.equal(bias, biases[layer])
    assert torch.equal(torch.cat([found["value.weight"][block] for block in sorted(found["value.weight"])]), heads)


def test_extra_states_and_optimizers_are_no_weights():
    settings = config("qwen3")
    [(held, place)] = ranks_of(full_tensors(settings), settings)
    held[0] |= {
        "decoder.layers.0.mlp.linear_fc1._extra_state": None,
        "optimizer.state.exp_avg": torch.zeros(3),
        "mtp.layers.0.enorm.weight": torch.zeros(16),
    }
    assert len(list(source_of(held, settings, place | {"ignore": ["mtp."]}).shards())) > 0
    with pytest.raises(
        ManifestError, match=r"'mtp.layers.0.enorm.weight' in chunk 0 of pipeline stage 0 is not a tensor"
    ):
        source_of(held, settings, place)


# what is refused


def one(family="qwen3", **changes):
    settings = config(family, **changes)
    [(held, place)] = ranks_of(full_tensors(settings), settings)
    return held[0], settings, place


QKV = "decoder.layers.2.self_attention.linear_qkv.weight"
NORM = "decoder.layers.{}.input_layernorm.weight"


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        (QKV, None, rf"has no '{QKV}', .*'model.layers.2.self_attn.q_proj.weight'"),
        ("output_layer.weight", None, "lm_head.weight.*`tied`"),
        ("embedding.word_embeddings.weight", None, "has no 'embedding"),
        ("decoder.final_layernorm.weight", None, "has no 'decoder.final"),
        (
            "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
            None,
            r"has no '(\S*)\.pre_mlp_layernorm.weight' nor '\1\.mlp.linear_fc1.layer_norm_weight'",
        ),
        (QKV, torch.zeros(63, 16), rf"'{QKV}' .*\[63, 16\].*\[64, 16\] on rank 0 of 1 \(tp\)"),
        ("embedding.word_embeddings.weight", torch.zeros(36, 16), r"\[36, 16\].*\[37, 16\]"),
        (NORM.format(4), torch.zeros(16), rf"'{NORM.format(4)}' .*is not a tensor of a qwen3 model.*such as"),
        (NORM.format(1), torch.zeros(16), "'model.layers.1.input_layernorm.weight', which another"),
        (QKV, {"a": 1}, f"'{QKV}' is a dict"),
        (QKV, torch.zeros(64, 16).as_subclass(type("Quantised", (torch.Tensor,), {})), "is a Quantised"),
    ],
    ids=str,
)
def test_tensors_that_do_not_fit_are_named(name, tensor, words):
    held, settings, place = one()
    if tensor is None:
        del held[name]
    else:
        held[name] = tensor
    with pytest.raises(ManifestError, match=words):
        MegatronSource(held, settings, **place)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tp_size": 2, "tp_rank": 2}, "tp_rank is 2"),
        ({"tp_size": 3}, "q_proj.weight: 64"),
        ({"pp_size": 3}, "4 layers.*`layers`"),
        *(({"pp_size": 2, "layers": layers}, "layers=") for layers in ([1, 2], [4], [[2, 1], [1]])),
        ({"tp_size": 4, "etp_size": 2}, "etp_rank"),
        ({"names": {"a": ("model.norm.weight", (16,), None)}}, "'a' makes a 'model.norm.weight'"),
        ({"names": {"a.{layer}": ("b", (16,), None)}}, "'a.{layer}' makes a 'b'"),
        ({"names": {"a": ("b", (16,), 1)}}, "'a' cannot be split"),
        ({"model_type": "no_such_model"}, "transformers.*'no_such_model'"),
        ({"model_type": None}, "transformers.*'None'"),
        ({"model_type": "phi3", "pad_token_id": 0}, "'model.layers.0.self_attn.qkv_proj.weight'.*not known"),
        ({"model_type": "gemma2"}, "'model.layers.0.pre_feedforward_layernorm.weight'.*`names`"),
        ({"model_type": "bloom"}, "'transformer.word_embeddings.weight'.*not known"),
        ({"hidden_size": None}, "(?s)transformers cannot.*hidden_size"),
        ({"vocab_size": "37"}, "(?s)transformers cannot.*vocab_size"),
        ({"num_key_value_heads": 3}, "4 heads"),
    ],
    ids=str,
)
def test_layouts_and_configs_that_cannot_be_are_refused(changes, words):
    held, settings, place = one()
    place = {key: value for key, value in place.items() if not key.startswith("etp")}
    sizes = {key: value for key, value in changes.items() if key in inspect.signature(MegatronSource).parameters}
    settings |= {key: value for key, value in changes.items() if key not in sizes}
    with pytest.raises(ConfigError, match=words):
        MegatronSource(held, settings, **place | sizes)


def test_experts_that_ranks_cannot_share_and_values_that_lie_otherwise_are_refused():
    held, settings, place = one("qwen3_moe")
    with pytest.raises(ConfigError, match="experts: 4"):
        MegatronSource(held, settings, **place | {"ep_size": 3})
    held, settings, place = one()
    module = module_of(held, range(4))
    for key in ("layernorm_zero_centered_gamma", "moe_mlp_glu_interleave_size"):
        module.get_submodule("module.module").config = SimpleNamespace(**{key: 32})
        with pytest.raises(ConfigError, match=f"{key} is 32"):
            MegatronSource(module, settings, **place)


def test_a_config_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    held, settings, place = one()
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        MegatronSource(held, tmp_path, **place)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds a list"):
        MegatronSource(held, tmp_path, **place)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="pip install transformers"):
        MegatronSource(held, settings, **place)


def test_several_dtypes_need_one_that_is_sent_and_a_rank_by_itself_sends_no_part():
    held, settings, place = one()
    full = full_tensors(settings)
    held[QKV] = held[QKV].bfloat16()
    with pytest.raises(ConfigError, match=rf"bfloat16 \({QKV}\).*`dtype`"):
        MegatronSource(held, settings, **place)
    source = MegatronSource(held, settings, **place, dtype=torch.bfloat16)
    assert {meta.dtype for meta in source.params()} == {torch.bfloat16}
    assert all(torch.equal(tensor, full[name].bfloat16()) for name, tensor in source)
    held, place = next(ranks_of(full, settings, tp=2))
    with pytest.raises(ManifestError, match=r"are held by no rank.*by itself"):
        next(iter(source_of(held, settings, place)))


# real ranks


def mine(rank, family, **layout):
    settings = config(family)
    full = full_tensors(settings)
    held, place = list(ranks_of(full, settings, **layout))[rank]
    return settings, full, held, place


def refused(source):
    with pytest.raises(ManifestError) as met:
        next(iter(source))
    return str(met.value)


@on_ranks(2)
def test_full_tensors_are_gathered_in_lockstep_as_they_are_at_the_time(rank, world, folder):
    for family, layout in (
        ("qwen3_moe", {"ep": 2, "experts": "stacked"}),
        ("qwen3_moe", {"pipeline": "two"}),
        ("qwen3", {"tp": 2}),
    ):
        settings, full, held, place = mine(rank, family, **layout)
        source = source_of(held, settings, place)
        for _ in range(2):
            found = list(source)
            assert [name for name, _ in found] == list(full)
            assert all(torch.equal(tensor, full[name]) for name, tensor in found)
            for tensor in [*full.values(), *held[0].values()]:  # what the trainer learns
                tensor.mul_(2)
    require_assembled(source)


@on_ranks(2)
def test_what_ranks_do_not_hold_together_is_said_to_all_of_them_and_none_waits(rank, world, folder):
    settings, full, held, place = mine(rank, "qwen3", tp=2)
    source = source_of(held, settings, place)
    assert "are held by no rank" in refused(source_of(held, settings, place | {"tp_rank": 0}))
    [(every, alone)] = ranks_of(full, settings)
    assert "that overlap" in refused(source_of(every, settings, alone) if rank == 0 else source)
    other = source_of(held, settings, place | {"dtype": torch.bfloat16 if rank == 1 else torch.float32})
    assert "trainer ranks 0 and 1 list other parameters" in refused(other)
    if rank == 1:
        del held[0]["decoder.final_layernorm.weight"]
    said = refused(source)
    assert ("final_layernorm" if rank == 1 else "trainer rank 1 cannot list its weights") in said, said


@on_ranks(2)
def test_each_rank_writes_the_deltas_of_its_own_blocks(rank, world, folder):
    settings, full, held, place = mine(rank, "qwen3_moe", ep=2, experts="stacked")
    source = source_of(held, settings, place)
    sender = tx.WeightSender(tx.DeltaTransport(folder, by_shard=True), rank=rank)
    for _ in range(3):
        for tensor in [*full.values(), *held[0].values()]:
            tensor[0].mul_(2)  # of the stacked experts a part of each
        sender.update_weights(source)
    full_of = {name: tensor for name, tensor in source}
    dist.barrier()
    if rank == 0:
        received = tx.DeltaTransport(folder).receive_weights(30)
        assert set(received.keys()) == set(full)
        for name, tensor in full_of.items():
            assert torch.equal(received[name], tensor), name
    sender.shutdown()
