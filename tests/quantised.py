"""Checkpoints whose linear weights are quantised already, as compressed-tensors has it: 8 bits, a scale per row."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

import torchrl_ext as tx

_TYPES = {"int8 checkpoint": torch.int8, "fp8 checkpoint": torch.float8_e4m3fn}
FORMS = tuple(_TYPES)
"""Names of the forms."""


def quantised(model, form):
    """What a trainer sends of a model: its weights under checkpoint names, those of linear layers with their scales."""
    found, kind = {}, _TYPES[form]
    largest = 127.0 if kind == torch.int8 else torch.finfo(kind).max
    for name, tensor in tx.as_source(model):
        if not name.endswith("proj.weight"):
            found[name] = tensor
            continue
        scale = tensor.float().abs().amax(1, keepdim=True) / largest
        steps = tensor.float() / scale
        found[name] = (steps.round() if kind == torch.int8 else steps).to(kind)
        found[name.removesuffix("weight") + "weight_scale"] = scale
    return found


@torch.no_grad()
def round_to(model, weights):
    """Give a model the values that quantised weights stand for; names of the module are those of the checkpoint."""
    parameters = dict(model.named_parameters())
    for name, tensor in weights.items():
        scale = weights.get(name.removesuffix("weight") + "weight_scale")
        if scale is not None and name.endswith("weight"):
            parameters[name].copy_(tensor.float() * scale)


def quantise_checkpoint(folder, model, form):
    """Turn the checkpoint of a model into one that is quantised."""
    folder = Path(folder)
    (shard,) = folder.glob("*.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in quantised(model, form).items()}, shard)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": _config(form)}))


def _config(form):
    kind = "int" if _TYPES[form] == torch.int8 else "float"
    bits = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**bits, "strategy": "channel", "dynamic": False},
        "input_activations": {**bits, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }
