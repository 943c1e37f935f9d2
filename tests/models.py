"""Tiny models that real engines load in a second."""

from __future__ import annotations

from pathlib import Path

import torch

_LINES = [
    "the trainer sends weights to the engine",
    "the engine serves tokens while weights travel",
    "a version is reported when the bytes are in place",
    "0 1 2 3 4 5 6 7 8 9 + - * / =",
]
VOCAB = 512
PROMPT = [3, 17, 42, 99, 7, 256, 300, 11]
"""Token ids that every tiny model knows."""


SIZES = {
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
"""Of the tiny models, by the names of their configs' fields."""


def tiny_config(**changes):
    """Qwen3 of 0.4 M parameters: vocab 512, hidden 128, 2 layers, 4 heads, 2 kv heads of 32, untied."""
    from transformers import Qwen3Config

    return Qwen3Config(**(SIZES | changes))


def tiny_model(seed=0, dtype=torch.float32, *, decided=False, **changes):
    """A random causal LM; two seeds give models whose greedy outputs differ.

    With ``decided`` the best token leads by far, so that two implementations agree on it in bfloat16 as well: a token
    prefers the one that a permutation gives it, and the layers, which are weaker, overrule that now and then.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(**changes), dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:  # wide enough that logits of a random model are well apart
                    parameter.normal_(0, 0.5 if "embed" in name or "lm_head" in name else 0.12)
                else:
                    parameter.uniform_(0.5, 1.5)
            if decided:
                for parameter in model.model.layers.parameters():
                    parameter.mul_(0.54 if parameter.dim() > 1 else 1.0)
                model.lm_head.weight.add_(model.model.embed_tokens.weight[torch.randperm(VOCAB)])
    return model.to(dtype).eval()


def tiny_tokenizer():
    """A byte-level BPE tokenizer trained on a few lines; ids 0, 1, 2 are <s>, </s>, <pad>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_LINES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=256
    )


def tiny_checkpoint(path, seed=0, dtype=torch.float32, **changes):
    """Save model and tokenizer as a Hugging Face checkpoint; returns the directory. ``changes`` as for `tiny_model`."""
    path = Path(path)
    tiny_model(seed, dtype, **changes).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@torch.no_grad()
def greedy(model, prompt=None, count=32):
    """The ``count`` tokens that `transformers` picks greedily after ``prompt``; nothing ends a generation early."""
    ids = torch.tensor([PROMPT if prompt is None else prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=2,
    )
    return output[0, ids.shape[1] :].tolist()


@torch.no_grad()
def greedy_over_kept_keys(models, switches, prompt=None, count=32):
    """The ``count`` tokens that `transformers` picks greedily where weights change in between and no key is dropped.

    Token ``switches[i]`` is the first one of ``models[i + 1]``.
    """
    from torchrl_ext.engines.embedded.scheduler import cache_name

    fed, cache, tokens = list(PROMPT if prompt is None else prompt), None, []
    while len(tokens) < count:
        model = models[sum(len(tokens) >= switch for switch in switches)]
        out = model(torch.tensor([fed]), use_cache=True, **{cache_name(model): cache})
        cache, fed = out[cache_name(model)], [int(out.logits[0, -1].argmax())]
        tokens += fed
    return tokens


@torch.no_grad()
def doubtful(model, tokens, prompt=None):
    """Those of an engine's greedy ``tokens`` that `transformers` would not pick in their place, as (index, shortfall).

    In float32 two implementations pick the same. In bfloat16 they sum in another order, so that a token whose logit is
    within two units in the last place of the best one is as good.
    """
    prompt = PROMPT if prompt is None else prompt
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    best = logits.max(-1).values
    allowed = 2 * torch.finfo(model.dtype).eps * best.abs() if model.dtype != torch.float32 else 1e-3
    short = best - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return [(index, short[index].item()) for index in (short > allowed).nonzero()[:, 0].tolist()]


_SMALL = SIZES | {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 128}
_SMALL |= {"num_attention_heads": 2, "head_dim": 8}
_LATENT = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim"), 8)
_LATENT |= dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 4)
_ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
_SEEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 16}

CONVERTED = ("qwen3_moe", "mixtral", "deepseek_v3", "qwen2_5_vl")
"""Kinds of models that `transformers` 5 holds otherwise than their checkpoints do."""


def converted_model(kind, seed=0, dtype=torch.float32, **changes):
    """A random model of 2 layers, whose weights all differ; the mixtures have 4 experts."""
    import transformers

    sizes = _SMALL | changes
    headless = {name: size for name, size in sizes.items() if name != "head_dim"}
    seeing = {"text_config": headless, "vision_config": _SEEN, "tie_word_embeddings": sizes["tie_word_embeddings"]}
    name, settings = {
        "qwen3_moe": (
            "Qwen3MoeForCausalLM",
            sizes | {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2},
        ),
        "mixtral": ("MixtralForCausalLM", headless | {"num_local_experts": 4}),
        "deepseek_v3": ("DeepseekV3ForCausalLM", headless | _LATENT | _ROUTED | {"moe_intermediate_size": 8}),
        "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", seeing),
        "hrm_text": ("HrmTextForCausalLM", sizes),  # its checkpoint has q, k, v and the gate in one tensor
        "dinov2": (  # its checkpoint has q, k and v by other names
            "Dinov2Model",
            {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        ),
    }[kind]
    make = getattr(transformers, name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make(make.config_class(**settings))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.3)
    return model.to(dtype).eval()
