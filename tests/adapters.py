"""Tiny LoRA policies."""

from __future__ import annotations

import torch

from tests.models import tiny_model

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def lora_policy(seed, *, base=0, rank=4, changes=None, **config):
    """A ``PeftModel`` on `tests.models.tiny_model`: random adapters, strong enough that greedy outputs differ."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": rank, "lora_alpha": 4 * rank, "target_modules": LAYERS, **config}
    model = get_peft_model(tiny_model(base, **(changes or {})), LoraConfig(**settings))
    randomise(model, seed)
    return model.eval()


@torch.no_grad()
def randomise(model, seed):
    """Other adapter weights for the same module, as after a training step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
