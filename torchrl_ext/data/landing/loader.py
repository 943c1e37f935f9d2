"""Loaders apply `(name, tensor)` pairs to a live model, in place, and completely or not at all where possible."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_ext.base.devices import current_device
from torchrl_ext.base.errors import ConfigError, ManifestError, NotConnectedError
from torchrl_ext.base.types import Info, ParamMeta
from torchrl_ext.data.landing.patcher import Changes, Patcher, compare, identity
from torchrl_ext.data.weights.blocks import Block
from torchrl_ext.data.weights.digests import digests_of
from torchrl_ext.data.weights.hf_names import Spelling, groups_of
from torchrl_ext.data.weights.shared import differing, refuse_digests, two_values
from torchrl_ext.data.weights.source import (
    MappingSource,
    ModuleSource,
    inner_model,
    is_mapping,
    is_tensordict_module,
    named_tensors,
    same_memory,
)

__all__ = ["Patchable", "Rehearsable", "Sliceable", "TensorsLoader", "WeightLoader", "as_loader"]


class WeightLoader(ABC):
    """Applies `(name, tensor)` pairs in checkpoint coordinates to a live model.

    It may also be `Patchable`, `Sliceable` or `Rehearsable`; otherwise it loads whole tensors and proves what it reads
    back.
    """

    shared: Sequence[Sequence[str]] = ()
    """Of the checked parameters, those that land in one memory of the model (`torchrl_ext.data.weights.shared`)."""

    @property
    def idle(self) -> bool:
        """Whether all layers are in the form that the model computes with; false while an update is loading."""
        return True

    @abstractmethod
    def check(self, params: Iterable[ParamMeta]) -> None:
        """Refuse parameters that do not fit the model, before any weight changes.

        Raises:
            ManifestError: a parameter is unknown, missing, or has another shape or dtype; the message names it.
        """

    def compare_start(self, stop: Event | None = None) -> None:  # noqa: B027 - most know it from names and shapes
        """Find out by the weights themselves where checked parameters land. Reads the whole model, the first time.

        Args:
            stop: ends the reading when another thread sets it, and leaves it for the next call.
        """

    @property
    def device(self) -> torch.device:
        """The device of the model's first tensor; of a model that does not show its tensors, this thread's default."""
        return current_device()

    def ready(self) -> None:  # noqa: B027 - most can always begin
        """Raise EngineRefusedError or StaleBaseError if a load cannot begin now; change nothing."""

    def start(self) -> None:  # noqa: B027 - nothing to prepare is a fine default
        """Begin an update; the model is idle from here to `finish`."""

    def part(self, names: frozenset[str] | None) -> None:
        """Announce which of the checked parameters the next update sends, while the model is in use; None for all.

        Raises:
            ManifestError: some of them can be loaded only together with others, which ``names`` lacks.
            ConfigError: this loader takes whole updates only.
        """
        if names is not None:
            raise ConfigError(
                f"a {type(self).__name__} takes whole updates only",
                state="nothing was changed; the engine still serves its previous weights",
                hint="leave only= out",
            )

    @abstractmethod
    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Apply every pair. A loader may keep a tensor until `finish`, because transports do not write to it again."""

    def finish(self) -> None:  # noqa: B027
        """End an update after all its pairs were applied."""

    def targets(self) -> Mapping[str, Tensor]:
        """Return tensors that a transport may fill directly, by checkpoint name; may be empty."""
        return {}

    def invalidate(self) -> None:  # noqa: B027 - most loaders know nothing of a model that it does not show
        """Forget the model's state, because something else loads it or releases its memory; change no weight."""

    def reloaded(self) -> None:  # noqa: B027 - most engines leave nothing out
        """Complete a load of the whole model that the engine did itself, without this loader."""

    def proof(self) -> str:
        """Return the level of proof of an update whose `digests` agree.

        ``"sent"``: the model's loader received the trainer's bytes; ``"in place"``: they were read back from the
        tensors that the model computes with; ``"rehearsed"``: `torchrl_ext.engines.rehearsal`.
        """
        return "sent"

    def digests(self) -> dict[str, str]:
        """Return the digest of every parameter that the update sends (see `part`), 32 hex digits, by name.

        They are computed from the model's own tensors if these can be read back, on their device; by default there are
        none. A loader whose runtime form cannot be read back returns the digests of the tensors that it handed to the
        model (or "", see `Rehearsable.vouch`), and its docstring says so.

        Raises:
            ConfigError: it has handed over nothing, and the model cannot be read back.
        """
        return {}


class Sliceable(ABC):
    """A `WeightLoader` that needs only the slices of tensors that its part of a model holds."""

    @abstractmethod
    def by_slices(self, wanted: bool) -> None:
        """Set whether the transport sends slices (an ability of it), from the next `start` on."""

    @abstractmethod
    def slices(self) -> Mapping[str, tuple[Block, ...]]:
        """Return the blocks of each checked parameter that this model holds, by name; an empty list if it holds none.

        A parameter that is not listed is needed whole. `load` receives a `torchrl_ext.data.landing.sliced.Sliced` for
        each parameter that is listed with blocks, and `targets` may return some.
        """

    @abstractmethod
    def whole(self) -> Mapping[str, str]:
        """Return the tensors that are needed whole although this model holds only a part -> the reason."""


class Patchable(ABC):
    """A `WeightLoader` that can write changes into its model element by element."""

    @abstractmethod
    def patchable(self, name: str) -> bool:
        """Return whether changes of this checkpoint tensor can be written; otherwise the tensor is sent whole."""

    @abstractmethod
    def stage(self, changes: Changes) -> None:
        """Translate changes while the model is in use, and compare the result with ``changes.digests``.

        Raises:
            IntegrityError: the result would differ from the trainer's tensor, usually because of a wrong base; the
                message names it.
        """

    def confirm(self) -> None:  # noqa: B027 - most loaders compare while they stage
        """Confirm the staged changes before `commit`; the workers of one engine may communicate here.

        Raises:
            IntegrityError: the result would differ from the trainer's tensors.
        """

    @abstractmethod
    def commit(self) -> None:
        """Write the staged changes between two steps of the model.

        Raises:
            NotConnectedError: nothing is staged.
            IntegrityError: a tensor of the model differs from what was written; the message names it.
        """

    def obstacle(self) -> str:
        """Return why the staged changes need an idle model; "" if `commit` may write them while it is in use."""
        return "this model takes changes only while it is idle"

    def undo(self) -> None:
        """Write back what the last `commit` replaced, exactly, until `keep` or the next `stage`.

        Raises:
            ConfigError, NotConnectedError: that is not known (any more).
            IntegrityError: a tensor of the model differs from what was written back; the message names it.
        """
        raise ConfigError(f"a {type(self).__name__} cannot take a version back", state="unchanged")

    def keep(self) -> None:  # noqa: B027 - most keep nothing
        """Give up the way back, and the memory that it takes."""


class Rehearsable(ABC):
    """A `WeightLoader` whose model processes weights after loading, so that a rehearsal can check an update."""

    @abstractmethod
    def unrehearsed(self) -> bool:
        """Return whether to rehearse: the model holds the weights that it was started with, and none ran yet."""

    @abstractmethod
    def rehearsal(self) -> Info:
        """Return the findings of the rehearsal, JSON-safe; ``why`` is the reason if there was none."""

    @abstractmethod
    def rehearse(self) -> Info:
        """Try the route of an update with known weights, while the model is idle, and return `rehearsal`.

        Raises:
            EngineRefusedError, IntegrityError: an update by this route leads to another state than a cold start.
        """

    @abstractmethod
    def refuse_unsound(self, *, unproved: bool = False) -> None:
        """Raise EngineRefusedError if a rehearsal showed that an update would go wrong."""

    @abstractmethod
    def vouch(self, wanted: bool) -> None:
        """Set whether `digests` will be called for the weights that are loaded from now on.

        A form that cannot be read back must be digested as it arrives, while the engine is paused; the loader skips
        that if nobody needs the digests.
        """


class TensorsLoader(WeightLoader, Patchable):
    """Loads into named tensors: a module's parameters and persistent buffers, or the leaves of a TensorDict.

    A `transformers` module accepts the names of its checkpoint as well as its own
    (`torchrl_ext.data.weights.hf_names`); a part of a stacked tensor is written in place. Digests have the names of the
    last checked update, and before the first update the names of the checkpoint.

    Args:
        target: module, TensorDict or mapping of tensors.

    Attributes:
        asleep: whether the memory of the tensors was released.
    """

    def __init__(self, target: Any) -> None:
        self.asleep = False
        is_module = isinstance(target, nn.Module) and not is_tensordict_module(target)
        self._module = target if is_module else None
        self._target = ModuleSource(target) if is_module else MappingSource(target)
        self._own = functools.partial(named_tensors, target, scratch=True) if is_module else self._target.tensors
        self._sent: frozenset[str] | None = None
        self._meet: frozenset[str] = frozenset()  # that share memory with others
        self._named: frozenset[str] | None = None  # of the parameters that are sent, those that the update brings
        self._patcher: Patcher | None = None  # this and the next are kept from the first `stage` on
        self._spelling: Spelling | None = None
        self._live: list[int] = []  # addresses of every tensor at the last one

    @property
    def device(self) -> torch.device:
        return next((tensor.device for _, tensor in self._own()), current_device())

    def targets(self) -> Mapping[str, Tensor]:
        """Return the live tensors but those that share memory: the second to be filled would overwrite the first."""
        places = self._spelled().places
        return {name: one for name, one in places.items() if name not in self._meet} if self._meet else places

    def check(self, params: Iterable[ParamMeta]) -> None:
        params = tuple(params)
        sent = frozenset(meta.name for meta in params)
        spelled = self._spelled(sent)
        spelled.check(params, dict(self._target.tensors()), asleep=self.asleep)
        self._sent, self._named = sent, None
        self.shared = spelled.shared(meta.name for meta in params)
        self._meet = frozenset(name for names in self.shared for name in names)

    def part(self, names: frozenset[str] | None) -> None:
        if names is not None:
            self._spelled().require(sorted(names))
        self._named = names

    @torch.no_grad()
    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        spelled, came = self._spelled(), dict[str, Tensor]()
        for name, tensor in pairs:
            if name in self._meet:
                came[name] = tensor
            if name not in spelled.places:
                raise ManifestError(f"the model has no parameter {name!r}")
            target = spelled.places[name]
            arrives, expected = ParamMeta.of(name, tensor), ParamMeta.of(name, target)
            if arrives != expected:
                raise ManifestError(f"parameter {name!r} arrives as {arrives.form}", expected=expected.form)
            if tensor.data_ptr() != target.data_ptr() or tensor.stride() != target.stride():
                target.copy_(tensor)
        self.invalidate()
        for names in self.shared:
            given = [name for name in names if name in came]
            if two := differing(given, came) if given else None:
                raise two_values(*two, state="the model holds a part of the update")

    def invalidate(self) -> None:
        self._patcher = self._spelling = None  # what they hold of the model's memory could not be given back

    def patchable(self, name: str) -> bool:
        return True

    def proof(self) -> str:
        return "in place"

    def stage(self, changes: Changes) -> None:
        refuse_digests(self.shared, changes.digests)
        found = self._patches().stage(changes)
        dropped = sorted(changes.digests.keys() - found.keys())
        if dropped:
            raise ManifestError(
                f"{len(dropped)} tensor(s) of the update would not be loaded, first {dropped[0]!r}",
                expected="the parameters that were checked when this worker connected",
                state="nothing was changed",
                hint="connect again, so that the engine learns the names of the update",
            )
        compare(found, changes.digests)

    def obstacle(self) -> str:
        return ""

    def commit(self) -> None:
        self._same_memory().commit()

    def undo(self) -> None:
        self._same_memory().undo()

    def keep(self) -> None:
        if self._patcher is not None:
            self._patcher.keep()

    def _same_memory(self) -> Patcher:
        if self._patcher is None or _addresses(self._own()) != self._live:
            raise NotConnectedError(
                "parameters were replaced or loaded since changes were staged, or none were",
                state="nothing was changed",
                hint="stage the changes again, or load a full version",
            )
        return self._patcher

    def _patches(self) -> Patcher:
        """Return a patcher of the parameters, looked up anew since training code may have replaced them."""
        spelled, self._live = self._spelled(), _addresses(self._own())
        if self._patcher is None or self._spelling is not spelled:
            sent = self._sent
            if sent is None:
                once = self._target.sent()
                sent = frozenset(name for name, own in spelled.source_of.items() if own in once)
            places = {name: one for name, one in spelled.places.items() if name in sent}
            self._patcher = Patcher(identity(places))
            self._spelling = spelled
        return self._patcher

    def digests(self) -> dict[str, str]:
        patches, spelled, firsts = self._patches(), self._spelled(), dict[Any, str]()  # tied tensors are read once
        named = {name: one for name, one in spelled.places.items() if self._named is None or name in self._named}
        first = {name: firsts.setdefault(same_memory(one), name) for name, one in named.items()}
        plain = [name for name in firsts.values() if name in patches.pieces]  # `stage` need not read them again
        found = patches.digests_of_memory(plain)
        found |= digests_of((name, named[name]) for name in firsts.values() if name not in patches.pieces)
        return {name: found[first.get(name, name)].hex() for name in (found | first)}

    def _spelled(self, sent: frozenset[str] | None = None) -> Spelling:
        """Return every tensor under each of its names; a module's non-persistent buffers may be sent, and need not be.

        Args:
            sent: names of an update; default: of the one that was checked last.
        """
        own = dict(self._own())
        groups = () if self._module is None else groups_of(self._module, own.items)
        sent = self._sent if sent is None else sent
        if self._spelling is not None and self._spelling.is_of(own, groups, sent):
            return self._spelling
        return Spelling(own, groups, sent)


def _addresses(tensors: Iterable[tuple[str, Tensor]]) -> list[int]:
    return [tensor.data_ptr() for _, tensor in tensors]


def as_loader(target: Any) -> WeightLoader:
    """Return the loader of a WeightLoader, a module (as `inner_model`), a TensorDict or a mapping.

    Raises:
        ConfigError: weights cannot be loaded into an object of this type.
    """
    if isinstance(target, WeightLoader):
        return target
    target = inner_model(target)
    if isinstance(target, nn.Module) or is_mapping(target):
        return TensorsLoader(target)
    raise ConfigError(
        f"weights cannot be loaded into a {type(target).__name__}",
        expected="an nn.Module, a TensorDict, a mapping of tensors or a WeightLoader",
    )
