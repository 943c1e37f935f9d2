"""Weight changes to measure on: a fine-tuning run made here, and synthetic pairs of any density."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Pair", "real_chain", "synthetic_pair"]

Pair = list[tuple[str, Tensor, Tensor]]
"""``(name, old, new)`` of every tensor of a model."""


def _text_tokens(vocabulary: int, limit: int) -> Tensor:
    """Python's own library as tokens: text of natural statistics that every machine has."""
    root, words = Path(sysconfig.get_paths()["stdlib"]), []
    for path in sorted(root.glob("*.py")):
        words += re.findall(r"\w+|\s+|[^\w\s]", path.read_text(errors="ignore"))
        if len(words) > limit:
            break
    known = {word: rank for rank, (word, _) in enumerate(Counter(words).most_common(vocabulary - 1), 1)}
    return torch.tensor([known.get(word, 0) for word in words[:limit]])


def real_chain(
    *,
    hidden: int = 256,
    layers: int = 8,
    vocabulary: int = 8192,
    pretrain_steps: int = 60,
    warm_steps: int = 10,
    syncs: int = 1,
    steps_per_sync: int = 1,
    lr: float = 1e-6,
    seed: int = 0,
) -> list[dict[str, Tensor]]:
    """Consecutive bfloat16 checkpoints of a causal language model, as a trainer with fp32 master weights makes them.

    The model is trained for ``pretrain_steps`` at 1e-3, then fine-tuned by AdamW at ``lr``: ``warm_steps`` first, so
    that the optimizer's state is that of a run under way, then ``steps_per_sync`` between checkpoints.

    Returns:
        ``syncs + 1`` checkpoints, name -> bfloat16 tensor.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 64),
        head_dim=32,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config).float()
    tokens = _text_tokens(vocabulary, 400_000)
    length, batch = 64, 8

    def run(optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            starts = torch.randint(0, tokens.numel() - length, (batch,))
            rows = torch.stack([tokens[s : s + length] for s in starts])
            optimizer.zero_grad()
            model(input_ids=rows, labels=rows).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    def checkpoint() -> dict[str, Tensor]:
        return {name: value.detach().to(torch.bfloat16) for name, value in model.state_dict().items()}

    run(torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95)), pretrain_steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    run(optimizer, warm_steps)
    chain = [checkpoint()]
    for _ in range(syncs):
        run(optimizer, steps_per_sync)
        chain.append(checkpoint())
    return chain


def _shapes(hidden: int, layers: int, vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a Qwen3 of this size."""
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(layers):
        for part, shape in (
            ("self_attn.q_proj", (2 * hidden, hidden)),
            ("self_attn.k_proj", (hidden, hidden)),
            ("self_attn.v_proj", (hidden, hidden)),
            ("self_attn.o_proj", (hidden, 2 * hidden)),
            ("self_attn.q_norm", (128,)),
            ("self_attn.k_norm", (128,)),
            ("mlp.gate_proj", (2 * hidden, hidden)),
            ("mlp.up_proj", (2 * hidden, hidden)),
            ("mlp.down_proj", (hidden, 2 * hidden)),
            ("input_layernorm", (hidden,)),
            ("post_attention_layernorm", (hidden,)),
        ):
            yield f"model.layers.{layer}.{part}.weight", shape
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def synthetic_pair(
    density: float, *, clustered: bool = False, hidden: int = 1024, layers: int = 28, vocabulary: int = 32_000
) -> Pair:
    """Normal weights of std 0.02 in bfloat16 and a uniform step of the size that changes ``density`` of them.

    Args:
        density: share of elements that change, 0 to 1; above 0.995 as for 0.995, since some steps are always too small.
        clustered: only some runs of 1,024 elements are touched, half of whose elements change.
    """
    generator = torch.Generator().manual_seed(int(density * 1e6) + clustered)
    inner = min(0.995, max(density, 0.5) if clustered else density)
    step, pair = _step_for(inner), []
    for name, shape in _shapes(hidden, layers, vocabulary):
        master = torch.empty(shape).normal_(0, 0.02, generator=generator)
        old = master.to(torch.bfloat16)
        change = torch.empty(shape).uniform_(-step, step, generator=generator)
        if clustered:
            runs = torch.rand(-(-master.numel() // 1024), generator=generator) < density / inner
            change *= runs.repeat_interleave(1024)[: master.numel()].reshape(shape)
        pair.append((name, old, (master + change).to(torch.bfloat16)))
    return pair


def _step_for(density: float) -> float:
    """The largest step that changes ``density`` of normal weights of std 0.02, by bisection."""
    generator = torch.Generator().manual_seed(1)
    master = torch.empty(1 << 20).normal_(0, 0.02, generator=generator)
    unit = torch.empty(1 << 20).uniform_(-1, 1, generator=generator)
    low, high = 0.0, 1.0
    for _ in range(40):
        step = (low + high) / 2
        changed = (master.to(torch.bfloat16) != (master + step * unit).to(torch.bfloat16)).float().mean()
        low, high = (step, high) if changed < density else (low, step)
    return high
