"""The ``only=`` argument, which selects the tensors that an update sends."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.weights.hf_names import groups_of
from torchrl_ext.weights.peft import is_peft
from torchrl_ext.weights.source import WeightSource, named_tensors

__all__ = ["Only", "chosen", "trainable"]

Only = str | re.Pattern[str] | Callable[[str], bool] | Mapping[str, bool] | Sequence[Any] | frozenset[str]
"""A selection of a model's tensors: a name; a module's path, which selects all tensors in it; a pattern with ``*``,
``?`` or ``[``; a compiled regular expression, which has to match the whole name; a predicate on names; a mapping of
name to bool; ``"trainable"``, for the registered module's parameters that require a gradient; or several of these."""

_HINT = "give names as they are sent, or a module's path, a pattern such as 'model.layers.3.*', or a function of names"


def chosen(only: Only, source: WeightSource, trained: Callable[[], frozenset[str]] | None = None) -> frozenset[str]:
    """Return the names of a source's tensors that ``only`` selects.

    Args:
        only: the selection; see `Only`.
        source: the source that is sent; a tied tensor's name selects the tensor that is sent for it.
        trained: returns the names that ``"trainable"`` selects; None without a module.

    Raises:
        ManifestError: ``only``, or one of its elements, selects no tensor; or it names a tensor that is not sent.
        ConfigError: ``only`` has an unsupported type, or is ``"trainable"`` without a module.
    """
    sent = {**source.tied(), **{meta.name: meta.name for meta in source.params()}}
    return frozenset(_chosen(only, sent, trained))


def _chosen(only: Any, sent: Mapping[str, str], trained: Callable[[], frozenset[str]] | None) -> set[str]:
    """Return the selected names; ``sent`` maps all names, including those of tied tensors, to names that are sent."""
    names: Iterable[str]
    found: set[str] = set()
    match only:
        case str() if only in sent:
            names = [only]
        case "trainable":
            if trained is None:
                raise ConfigError(
                    "only='trainable' needs a module that knows which of its parameters require a gradient",
                    state="nothing was sent",
                    hint="call register_model(policy) with the module, or name the tensors",
                )
            names = filter(sent.__contains__, trained())
        case str() if any(mark in only for mark in "*?["):
            names = [name for name in sent if fnmatchcase(name, only)]
        case str():
            names = [name for name in sent if name.startswith(f"{only}.")] or [only]
        case re.Pattern():
            names = filter(only.fullmatch, sent)
        case Mapping():
            names = [name for name, meant in only.items() if meant]
        case Sequence() | frozenset():
            names = found.union(*(_chosen(one, sent, trained) for one in only))
        case _ if callable(only):
            names = filter(only, sent)
        case _:
            raise ConfigError(
                f"only={only!r:.200} does not select tensors by name", state="nothing was sent", hint=_HINT
            )
    for name in names:
        if name not in sent:
            close = difflib.get_close_matches(str(name), sent, n=1, cutoff=0.0)
            raise ManifestError(
                f"no tensor or module of the update is called {name!r}",
                expected=f"names such as {close[0]!r}" if close else "a model with tensors",
                state="nothing was sent",
                hint=_HINT,
            )
        found.add(sent[name])
    if not found:
        raise ManifestError(
            f"only={only!r:.200} selects none of the {len({*sent.values()})} tensors that are sent",
            state="nothing was sent",
            hint=_HINT,
        )
    return found


def trainable(module: nn.Module) -> frozenset[str]:
    """Return the checkpoint names of a module's parameters that require a gradient.

    Raises:
        ConfigError: the module has adapters, whose parameters are merged into other tensors.
    """
    if is_peft(module):
        raise ConfigError(
            "only='trainable' cannot select the tensors that this module's adapters are merged into",
            state="nothing was sent",
            hint="name the tensors, or send only the adapter",
        )
    own = {name for name, tensor in named_tensors(module) if tensor.requires_grad}
    groups = (group for group in groups_of(module) if not own.isdisjoint(group.sources))
    return frozenset(own.union(*(group.results for group in groups)))
