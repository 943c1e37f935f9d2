"""Weights of a Megatron-Core trainer, as Megatron-Bridge exports them: full tensors under Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.weights.source import WeightSource

__all__ = ["MegatronSource"]


class MegatronSource(WeightSource):
    """The tensors of a Megatron model's Hugging Face checkpoint, gathered one at a time.

    Every pass is a collective over Megatron's groups: each trainer rank makes a source, which goes through the export
    once for shapes and dtypes, and takes part in each update.

    Args:
        bridge: ``megatron.bridge.AutoBridge``, or anything with its ``export_hf_weights(model, cpu=, show_progress=)``,
            which yields pairs of a name and a full tensor, in the same order on every rank (source: Megatron-Bridge,
            ``bridge/models/conversion/auto_bridge.py``).
        model: the list of this rank's Megatron modules.
        cpu: whether tensors are exported into CPU memory.

    Example:
        >>> from types import SimpleNamespace
        >>> exported = {"model.norm.weight": torch.ones(4)}
        >>> bridge = SimpleNamespace(export_hf_weights=lambda model, cpu, show_progress: exported.items())
        >>> [meta.name for meta in tx.MegatronSource(bridge, [policy]).params()]
        ['model.norm.weight']
    """

    def __init__(self, bridge: Any, model: Any, *, cpu: bool = False) -> None:
        self._bridge, self._model, self._cpu = bridge, model, cpu
        self._params = tuple([ParamMeta.of(name, tensor) for name, tensor in self])

    def params(self) -> tuple[ParamMeta, ...]:
        return self._params

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        exported = self._bridge.export_hf_weights(self._model, cpu=self._cpu, show_progress=False)
        return ((name, tensor.detach()) for name, tensor in exported)

    def files(self) -> Mapping[str, bytes]:
        pretrained = getattr(self._bridge, "hf_pretrained", None)
        config = getattr(pretrained, "config", pretrained)
        return {} if config is None else {"config.json": config.to_json_string().encode()}
