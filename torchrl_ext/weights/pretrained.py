"""The files that make a `transformers` model's weights a checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

import torch
from torch import nn

from torchrl_ext.errors import IntegrityError
from torchrl_ext.types import dtype_name

__all__ = ["model_files", "with_dtype"]


def model_files(module: nn.Module) -> Mapping[str, bytes]:
    """``config.json`` (and ``generation_config.json``) of the `transformers` model in ``module``, else nothing.

    Never imports transformers. The fields that ``save_pretrained`` adds (``architectures``, ``dtype``) are added to
    what is written, not to the live config.
    """
    if "transformers" not in sys.modules:
        return {}
    from transformers import PreTrainedModel

    model = next((part for part in module.modules() if isinstance(part, PreTrainedModel)), None)
    if model is None:
        return {}
    config = json.loads(model.config.to_json_string())
    config["architectures"] = [type(model).__name__.removeprefix("FSDP")]  # fully_shard renames the class
    config["dtype"] = dtype_name(model.dtype)
    files = {"config.json": json.dumps(config, indent=2).encode() + b"\n"}
    if model.can_generate() and model.generation_config is not None:
        files["generation_config.json"] = model.generation_config.to_json_string().encode()
    return files


def with_dtype(files: Mapping[str, bytes], dtype: torch.dtype) -> dict[str, bytes]:
    """``files`` with ``dtype`` in their ``config.json``, where there is one that names a dtype.

    Raises:
        IntegrityError: it is no JSON object.
    """
    if "config.json" not in files:
        return dict(files)
    try:
        config = json.loads(files["config.json"])
        if not isinstance(config, dict):
            raise TypeError(f"it is a {type(config).__name__}")
    except (ValueError, TypeError, RecursionError) as error:
        raise IntegrityError(
            f"the config.json beside the weights cannot be read: {error}",
            expected="a JSON object",
            state="nothing was written",
            hint="copy the checkpoint again, or pass the file by files=",
        ) from error
    named = [key for key in ("dtype", "torch_dtype") if key in config]  # the latter before transformers 5
    config |= dict.fromkeys(named, dtype_name(dtype))
    return {**files, "config.json": json.dumps(config, indent=2).encode() + b"\n"}
