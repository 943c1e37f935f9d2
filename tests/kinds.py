"""Tiny random models of several architectures, for what engines do with each kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tests.models import VOCAB, tiny_config, tiny_tokenizer

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_VISION = {"image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502, "vision_end_token_id": 503}


def _sizes(*left_out, **changes):
    """The sizes that all kinds share, but for some fields."""
    return {name: value for name, value in (_SIZES | changes).items() if name not in left_out}


def _llama():
    from transformers import LlamaConfig

    return LlamaConfig(**_sizes())


def _qwen3_moe():
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**_sizes(), **_EXPERTS, norm_topk_prob=True)


def _mixtral():
    from transformers import MixtralConfig

    return MixtralConfig(**_sizes(intermediate_size=64), num_local_experts=4, num_experts_per_tok=2)


def _deepseek_v3():
    """Latent attention of 512 + 64, the size that vLLM's decode on the CPU knows; the first layer has no experts.

    Positions are stretched (YaRN) as in the real one: vLLM on the CPU rotates latent attention wrongly without.
    """
    from transformers import DeepseekV3Config

    rope = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 256,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    return DeepseekV3Config(
        **_sizes("head_dim", num_key_value_heads=4),
        rope_parameters=rope,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        topk_method="noaux_tc",  # engines take how to route from these two
        scoring_func="sigmoid",
        moe_layer_freq=1,  # SGLang asks for it
        routed_scaling_factor=1.5,
        first_k_dense_replace=1,
    )


def _qwen3_next():
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        **_sizes(),
        **_EXPERTS,
        shared_expert_intermediate_size=64,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )


def _falcon_h1():
    from transformers import FalconH1Config

    return FalconH1Config(
        **_sizes(),
        mamba_d_ssm=128,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=32,
        mamba_n_groups=1,
        mamba_chunk_size=64,
    )


def _granite_hybrid():
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(
        **_sizes("head_dim"),
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
        layer_types=["mamba", "attention"],
        position_embedding_type="rope",
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=32,
        mamba_n_groups=1,
        mamba_expand=2,
        mamba_chunk_size=64,
    )


def _mamba2():
    from transformers import Mamba2Config

    return Mamba2Config(
        **_sizes(
            *("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
        ),
        num_heads=8,
        head_dim=32,
        state_size=32,
        n_groups=1,
        expand=2,
        chunk_size=64,
    )


def _gemma3():
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        **_sizes(tie_word_embeddings=True),
        query_pre_attn_scalar=32,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
    )


def _qwen25_vl():
    from transformers import Qwen2_5_VLConfig

    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10_000.0}
    return Qwen2_5_VLConfig(
        text_config=_sizes("head_dim", rope_parameters=rope),
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 128,
            "fullatt_block_indexes": [1],
        },
        tie_word_embeddings=False,
        **_VISION,
    )


def _qwen3_vl():
    from transformers import Qwen3VLConfig

    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10_000.0, "mrope_interleaved": True}
    return Qwen3VLConfig(
        text_config=_sizes(rope_parameters=rope),
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 128,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        tie_word_embeddings=False,
        **_VISION,
    )


KINDS: dict[str, Callable] = {
    "qwen3": tiny_config,
    "qwen3-tied": lambda: tiny_config(tie_word_embeddings=True),
    "llama": _llama,
    "qwen3-moe": _qwen3_moe,
    "mixtral": _mixtral,
    "deepseek-v3": _deepseek_v3,
    "qwen3-next": _qwen3_next,
    "falcon-h1": _falcon_h1,
    "granite-hybrid": _granite_hybrid,
    "mamba2": _mamba2,
    "gemma3": _gemma3,
    "qwen2.5-vl": _qwen25_vl,
    "qwen3-vl": _qwen3_vl,
}
"""Name of a kind -> what makes its config."""
_STATE_SPACE = ("A_log", "dt_bias", "D")  # decays and steps: their own starts are in range


def kind_model(kind, seed=0, dtype=torch.float32):
    """A random model of a kind, with every weight, norm and bias random; two seeds give other greedy outputs."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = KINDS[kind]()
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    embedding = 0.08 if "gemma" in config.model_type else 0.5  # Gemma multiplies what it looks up in its head
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32)
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
