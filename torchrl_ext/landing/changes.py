"""What a model that holds one version needs to hold another one, and nothing more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from torchrl_ext.codecs.patch import Patch
from torchrl_ext.types import ParamMeta

__all__ = ["Changes"]


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What leads from the version that a worker holds to another one, folded: no element twice.

    Attributes:
        held: run id and number of the version that it starts from.
        reached: run id and number of the version that it leads to.
        params: every parameter of the model, in order.
        patches: makes one pass over the changed ones (`torchrl_ext.codecs.patch.Patch`); it asks for each name first
            whether it is wanted, and decodes only what is.
        digests: position digest of every tensor at the end, 32 hex digits, by name.
        whole: the tensors of some names at the end, from the host copies that `Incremental.retain` asked for.
    """

    held: tuple[str, int]
    reached: tuple[str, int]
    params: tuple[ParamMeta, ...]
    patches: Callable[[Callable[[str], bool]], Iterator[Patch]]
    digests: Mapping[str, str]
    whole: Callable[[Iterable[str]], Iterator[tuple[str, Tensor]]]
