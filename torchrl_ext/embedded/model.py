"""Load the model that the embedded engine hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torchrl_ext.errors import ConfigError
from torchrl_ext.types import dtype_from_name

__all__ = ["load_model"]


def load_model(model_dir: str, dtype: str) -> Any:
    """Return the model of a Hugging Face checkpoint directory.

    Args:
        model_dir: the directory.
        dtype: ``"auto"`` (the checkpoint's) or a dtype's name.

    Raises:
        ConfigError: there is none, or no causal LM.
    """
    if not (Path(model_dir) / "config.json").is_file():
        raise ConfigError(f"{model_dir} holds no model", expected="a Hugging Face checkpoint directory")
    from transformers import AutoModelForCausalLM

    wanted = "auto" if dtype == "auto" else dtype_from_name(dtype)
    allow_amx = getattr(torch.cpu, "_init_amx", None)
    if dtype == "bfloat16" and allow_amx is not None:
        allow_amx()  # where the processor has AMX, the kernel wants a request before bfloat16 products may use it
    try:
        return AutoModelForCausalLM.from_pretrained(model_dir, dtype=wanted, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no causal LM can be loaded from {model_dir}: {error}") from error
