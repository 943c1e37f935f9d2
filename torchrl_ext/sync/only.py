"""Parts of a model: the source that yields some tensors of another one, and the ways to say which these are."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, final

from torch import Tensor, nn

from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.types import ParamMeta, Part
from torchrl_ext.weights.groups import groups_of
from torchrl_ext.weights.peft import is_peft
from torchrl_ext.weights.shards.blocks import Shard
from torchrl_ext.weights.source import WeightSource, named_tensors

__all__ = ["Only", "PartSource", "chosen", "trainable"]

Only = str | re.Pattern[str] | Callable[[str], bool] | Mapping[str, bool] | Sequence[Any] | frozenset[str]
"""Which tensors of a model: a name; the path of a module, which stands for all tensors in it; a pattern with ``*``,
``?`` or ``[``; a compiled expression, which has to match a whole name; a function of a name; a mask, name -> whether;
``"trainable"``, for the parameters of the registered module that require a gradient; or several of these."""

_TRAINABLE = "trainable"
_HINT = "give names as they are sent, or a module's path, a pattern such as 'model.layers.3.*', or a function of names"


@final
class PartSource(WeightSource):
    """Some tensors of another source, in its order.

    Args:
        source: of all of them.
        part: which, and the version that has the others.
    """

    def __init__(self, source: WeightSource, part: Part) -> None:
        self.whole, self.part, self._names = source, part, part.names

    def params(self) -> tuple[ParamMeta, ...]:
        return tuple(meta for meta in self.whole.params() if meta.name in self._names)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.whole.pairs(self._names)

    def held(self) -> Mapping[str, Tensor]:
        return {name: tensor for name, tensor in self.whole.held().items() if name in self._names}

    def shards(self) -> Iterator[Shard]:
        """Yield the blocks of these tensors that this rank holds.

        What gathers is taken in order, so those that are left out in between are taken too, and dropped.
        """
        left_out: list[Callable[[], Tensor]] = []
        for shard in self.whole.shards():
            if shard.meta.name not in self._names:
                left_out += [shard.take] if shard.gathers else []
            elif shard.gathers and left_out:
                yield replace(shard, take=_after(left_out, shard.take))
                left_out = []
            else:
                yield shard

    def tied(self) -> Mapping[str, str]:
        return self.whole.tied()

    def files(self) -> Mapping[str, bytes]:
        return self.whole.files()


def _after(others: Sequence[Callable[[], Tensor]], take: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def taken() -> Tensor:
        for other in others:
            other()
        return take()

    return taken


def chosen(only: Only, source: WeightSource, trained: Callable[[], frozenset[str]] | None = None) -> frozenset[str]:
    """Return the names of a source's tensors that ``only`` means.

    Args:
        only: which; see `Only`.
        source: what is sent; names of tied tensors stand for those under which these are sent.
        trained: returns the names that ``"trainable"`` stands for; None where there is no module to ask.

    Raises:
        ManifestError: nothing is meant, by all of it or by one of several; or a name is none that is sent.
        ConfigError: ``only`` says nothing about names.
    """
    return frozenset(_some(only, tuple(meta.name for meta in source.params()), source.tied(), trained))


def _some(
    only: Any, names: Sequence[str], tied: Mapping[str, str], trained: Callable[[], frozenset[str]] | None
) -> list[str]:
    """Return what is meant, which has to be something."""
    found = list(_meant(only, names, tied, trained))
    if not found:
        raise ManifestError(
            f"only={only!r:.200} means none of the {len(names)} tensors that are sent",
            state="nothing was sent",
            hint=_HINT,
        )
    return found


def _meant(
    only: Any, names: Sequence[str], tied: Mapping[str, str], trained: Callable[[], frozenset[str]] | None
) -> Iterator[str]:
    if isinstance(only, str):
        yield from _by_text(only, names, tied, trained)
    elif isinstance(only, re.Pattern):
        yield from (name for name in names if only.fullmatch(name))
    elif isinstance(only, Mapping):
        for name, meant in only.items():
            if meant:
                yield _known(name, names, tied)
    elif isinstance(only, (Sequence, frozenset)):
        for one in only:
            yield from _some(one, names, tied, trained)
    elif callable(only):
        yield from (name for name in names if only(name))
    else:
        raise ConfigError(f"only={only!r:.200} says nothing about names", state="nothing was sent", hint=_HINT)


def _by_text(
    text: str, names: Sequence[str], tied: Mapping[str, str], trained: Callable[[], frozenset[str]] | None
) -> Iterator[str]:
    if text in names or text in tied:
        yield tied.get(text, text)
    elif text == _TRAINABLE:
        if trained is None:
            raise ConfigError(
                "only='trainable' needs a module that knows which of its parameters require a gradient",
                state="nothing was sent",
                hint="call register_model(policy) with the module, or name the tensors",
            )
        told = trained()
        yield from (tied.get(name, name) for name in told if name in names or name in tied)
    elif any(mark in text for mark in "*?["):
        yield from (name for name in names if fnmatchcase(name, text))
        yield from (via for name, via in tied.items() if fnmatchcase(name, text))
    else:
        inside = [name for name in names if name.startswith(f"{text}.")]
        inside += [via for name, via in tied.items() if name.startswith(f"{text}.")]
        yield from inside or [_known(text, names, tied)]


def _known(name: Any, names: Sequence[str], tied: Mapping[str, str]) -> str:
    if name in tied or name in names:
        return tied.get(name, name)
    close = difflib.get_close_matches(str(name), [*names, *tied], n=1, cutoff=0.0)
    raise ManifestError(
        f"no tensor that is sent is called {name!r}, and no module",
        expected=f"names such as {close[0]!r}" if close else "a model with tensors",
        state="nothing was sent",
        hint=_HINT,
    )


def trainable(module: nn.Module) -> frozenset[str]:
    """Return the checkpoint names of the parameters of a module that require a gradient.

    Raises:
        ConfigError: it has adapters, whose parameters are merged into other tensors.
    """
    if is_peft(module):
        raise ConfigError(
            "only='trainable' does not say which tensors the adapters of this module are merged into",
            state="nothing was sent",
            hint="name the tensors, or send the adapter alone",
        )
    own = {name for name, tensor in named_tensors(module) if tensor.requires_grad}
    found = set(own)
    for group in groups_of(module):
        if not own.isdisjoint(group.sources):
            found |= group.results.keys()
    return frozenset(found)
