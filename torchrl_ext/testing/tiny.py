"""Makes a causal LM small enough for demonstrations and tests, without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torchrl_ext.base.errors import ConfigError

__all__ = ["make_tiny_lm", "make_tokenizer"]

VOCABULARY = 512

_LINES = (
    "The trainer changes the policy and the engine follows.",
    "A version is served only when every weight has arrived.",
    "Count to ten: one two three four five six seven eight nine ten.",
    "pause load resume, pause load resume, pause load resume",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20",
)


def make_tiny_lm(directory: str | Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    """Write a random Qwen3 checkpoint with a tokenizer, which `transformers`, vLLM and SGLang can load.

    Args:
        directory: where to write; created if it does not exist.
        seed: seed of the random weights; the same seed gives the same bytes.
        config: `transformers.Qwen3Config` fields that override the defaults (0.5 M parameters, 2 layers of 128,
            vocabulary of 512, untied). Tied embeddings are stored once.

    Returns:
        The directory.

    Raises:
        ConfigError: transformers is not installed.
    """
    from safetensors.torch import save_file

    tokenizer = make_tokenizer()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**{**settings, **config}))
        model.to(dtype)  # type: ignore[arg-type]  # transformers' wrapper hides `self`
    tensors = model.named_parameters()  # a tied lm_head is not listed; there are no persistent buffers
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), path / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = ["Qwen3ForCausalLM"]
    for part in (model.config, model.generation_config, tokenizer):
        part.save_pretrained(path)
    return path


def make_tokenizer() -> Any:
    """Return a byte-level BPE tokenizer of at most 512 tokens, as a `transformers.PreTrainedTokenizerFast`."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast
    except ModuleNotFoundError as error:
        raise ConfigError.missing(error.name, "embedded") from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|pad|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_LINES, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers does not type it
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>"
    )
