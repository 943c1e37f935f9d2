"""`Snapshot` copies a source, so that an update can go on while the trainer changes its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from torchrl_ext.weights.source import Row, RowSource, WeightSource, checked

__all__ = ["Snapshot"]


class Snapshot(RowSource):
    """A copy of all tensors of another source, on the same devices; it takes the bytes of the model once more.

    Args:
        source: passed over once, here.

    Raises:
        ManifestError: as `checked`.
    """

    def __init__(self, source: WeightSource) -> None:
        whole = torch.contiguous_format
        with torch.no_grad():
            self._tensors = {meta.name: tensor.clone(memory_format=whole) for meta, tensor in checked(source)}
        for device in {tensor.device for tensor in self._tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # another thread, on another stream, reads the copies
        self._source, self._tied = source, source.tied()

    def rows(self) -> Iterable[Row]:
        for name, tensor in self._tensors.items():
            yield Row(name, tensor, tensor.detach)

    def held(self) -> Mapping[str, Tensor]:
        return self._tensors

    def tied(self) -> Mapping[str, str]:
        return self._tied

    def files(self) -> Mapping[str, bytes]:
        return self._source.files()
