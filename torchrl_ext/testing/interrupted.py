"""A source of weights that calls a function in the middle, for tests of what a broken update leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from torchrl_ext.data.weights.blocks import Shard
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.data.weights.source import MappingSource

__all__ = ["Interrupted"]


class Interrupted(MappingSource):
    """Weights of any source; each pass over them calls ``call`` in the middle, once that is set."""

    def __init__(self, weights: Any, call: Callable[[], object] | None = None) -> None:
        super().__init__(dict(as_source(weights)))
        self.call = call

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._interrupted([*super().__iter__()])

    def shards(self) -> Iterator[Shard]:
        return self._interrupted([*super().shards()])

    def _interrupted(self, found: list[Any]) -> Iterator[Any]:
        yield from found[: len(found) // 2]
        if self.call is not None:
            self.call()
        yield from found[len(found) // 2 :]
