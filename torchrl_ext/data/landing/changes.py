"""What a delta brings to a model, and what it must lead to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.deltas.streams import StreamPatch

__all__ = ["Changes"]


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The changes that lead a model from one version to another, merged so that no element occurs twice.

    Attributes:
        patches: iterates once over the changes. It takes a function that says whether a changed tensor is wanted, and
            skips blocks without a wanted tensor; other blocks may include changes of unwanted tensors.
        digests: digest of every tensor after the changes, 32 hex digits, by name.
        whole: returns the named tensors as they are after the changes, for tensors that are not patchable.
        held, reached: run id and number of the first and the last version.
        params: every parameter of the model, in order.
    """

    patches: Callable[[Callable[[str], bool]], Iterator[StreamPatch]]
    digests: Mapping[str, str]
    whole: Callable[[Iterable[str]], Iterator[tuple[str, Tensor]]]
    held: tuple[str, int] = ("", 0)
    reached: tuple[str, int] = ("", 0)
    params: tuple[ParamMeta, ...] = ()
