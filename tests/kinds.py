"""Tiny random models of several architectures, for what engines do with each kind."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from tests.models import SIZES, tiny_tokenizer

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

# Latent attention of 512 + 64, the size that vLLM's decode on the CPU knows; the first layer has no experts. Positions
# are stretched (YaRN) as in the real model: vLLM on the CPU rotates latent attention wrongly without.
_DEEPSEEK_V3 = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 256,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",  # engines take how to route from these two
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,  # SGLang asks for it
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}

_MAMBA2 = {
    **dict.fromkeys(("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")),
    "num_heads": 8,
    "state_size": 32,
    "n_groups": 1,
    "expand": 2,
    "chunk_size": 64,
}

_GEMMA3 = {
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 32,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"],
}

KINDS = {
    "qwen3": ("Qwen3Config", {}),
    "qwen3-tied": ("Qwen3Config", {"tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3MoeConfig", {**_EXPERTS, "norm_topk_prob": True}),
    "mixtral": ("MixtralConfig", {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek-v3": ("DeepseekV3Config", _DEEPSEEK_V3),
    "mamba2": ("Mamba2Config", _MAMBA2),
    "gemma3": ("Gemma3TextConfig", _GEMMA3),
}
"""Name of a kind -> its config's class, and how it differs from `tests.models.SIZES`; None leaves a field out."""


def kind_config(kind):
    """The config of a tiny model of a kind."""
    name, changes = KINDS[kind]
    make = getattr(transformers, name)
    sizes = {field: size for field, size in (SIZES | changes).items() if size is not None}
    return make(**sizes)


_STATE_SPACE = ("A_log", "dt_bias", "D")  # decays and steps: their own starts are in range


def kind_model(kind, seed=0, dtype=torch.float32):
    """A random model of a kind, with every weight, norm and bias random; two seeds give other greedy outputs."""
    config = kind_config(kind)
    embedding = 0.08 if "gemma" in config.model_type else 0.5  # Gemma multiplies what it looks up in its head
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(_STATE_SPACE):
                    parameter.add_(torch.rand_like(parameter) / 4)
                elif parameter.dim() > 1:  # wide enough that logits of a random model are well apart
                    parameter.normal_(0, embedding if "embed" in name or "lm_head" in name else 0.12)
                elif name.endswith("bias"):
                    parameter.normal_(0, 0.1)
                else:
                    parameter.uniform_(0.5, 1.5)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):  # it decides which experts a token goes to
                    buffer.normal_(0, 0.2)
    return model.to(dtype).eval()


def kind_checkpoint(kind, folder, seed=0, dtype=torch.float32):
    """Save a model of a kind and the tokenizer as a Hugging Face checkpoint; returns the directory."""
    folder = Path(folder)
    kind_model(kind, seed, dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
