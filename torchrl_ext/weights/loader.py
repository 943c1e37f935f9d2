"""How weights land: `(name, tensor)` pairs applied to something live, in place and all or nothing where possible."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.types import Info, ParamMeta
from torchrl_ext.weights.digest import tensor_digest
from torchrl_ext.weights.source import (
    MappingSource,
    ModuleSource,
    full,
    is_mapping,
    is_tensordict_module,
    named_tensors,
    same_memory,
)

if TYPE_CHECKING:
    from torchrl_ext.weights.landing import Patcher

__all__ = ["Staging", "TensorsLoader", "WeightLoader", "as_loader"]


class Staging(Protocol):
    """What `WeightLoader.stage` uses of a transport's changes."""

    @property
    def digests(self) -> Mapping[str, str]:
        """Position digest of every tensor at the end, 32 hex digits, by name."""

    @property
    def patches(self) -> Callable[[], Iterator[Any]]:
        """Makes one pass over the changed tensors (`torchrl_ext.codecs.patch.Patch`)."""

    @property
    def whole(self) -> Callable[[Iterable[str]], Iterator[tuple[str, Tensor]]]:
        """Tensors at the end, of names that are not patchable."""


class WeightLoader(ABC):
    """Applies pairs in checkpoint coordinates to a live model."""

    @abstractmethod
    def check(self, params: Iterable[ParamMeta]) -> None:
        """Refuse what cannot land, before anything is touched.

        Raises:
            ManifestError: names a parameter that is unknown, missing, or of another shape or dtype.
        """

    def start(self) -> None:  # noqa: B027 - nothing to prepare is a fine default
        """The model is idle from here to `finish`."""

    @abstractmethod
    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Apply every pair. A tensor may be kept until `finish`: transports give memory that nobody else writes."""

    def finish(self) -> None:  # noqa: B027
        """Every pair was applied."""

    def targets(self) -> Mapping[str, Tensor]:
        """Tensors that a transport may fill directly, by checkpoint name; may be empty."""
        return {}

    def patchable(self, name: str) -> bool:
        """Whether changes of this checkpoint tensor can be written into the model element by element."""
        return False

    def position_digests(self) -> dict[str, str]:
        """Position digest of every checkpoint tensor in the model, 32 hex digits; recomputed from its bytes."""
        raise ConfigError(f"a {type(self).__name__} cannot read back what its model holds")

    def stage(self, changes: Staging) -> None:
        """Translate changes while the model is in use, and hold the result against ``changes.digests``.

        Raises:
            IntegrityError: what would come out is not what the trainer has (a wrong base, mostly); names the tensor.
        """
        raise ConfigError(f"a {type(self).__name__} takes no changes, only whole tensors")

    def confirm(self) -> None:  # noqa: B027 - most loaders compare while they stage
        """Called between `stage` and `commit`, where the workers of one engine may talk to each other.

        Raises:
            IntegrityError: what would come out is not what the trainer has.
        """

    def commit(self) -> None:
        """Write what was staged. The model is idle."""
        raise ConfigError(f"a {type(self).__name__} takes no changes, only whole tensors")

    def resident(self) -> Iterator[tuple[str, Tensor]]:
        """What the model holds now, in checkpoint coordinates, as far as it can be read back."""
        return iter(())

    def proof(self) -> str:
        """What it says of an update that `digests` agree.

        ``"sent"``: the model's loader was handed the trainer's bytes; ``"in place"``: they were read from what the
        model computes with; ``"rehearsed"``: `torchrl_ext.sync.rehearsal`.
        """
        return "sent"

    def unrehearsed(self, *, again: bool = False) -> bool:
        """Whether a rehearsal can show something: the model holds what it was started with, and there was none yet.

        Args:
            again: also where there was one.
        """
        return False

    def rehearsal(self) -> Info:
        """What the rehearsal showed, JSON-safe; ``why`` says why there was none."""
        return {"why": "the model computes with the tensors that are read back: there is nothing to rehearse"}

    def rehearse(self) -> Info:
        """Try the road of an update with weights that are known; returns `rehearsal`. The model is idle.

        Raises:
            EngineRefusedError, IntegrityError: the road does not lead where a cold start does.
        """
        return self.rehearsal()

    def refuse_unsound(self) -> None:  # noqa: B027 - only a rehearsal can show it
        """Raises EngineRefusedError where a rehearsal showed that an update would go wrong."""

    def digests(self) -> dict[str, str]:
        """`tensor_digest` of every parameter of the update, in checkpoint coordinates.

        Taken from what the model holds (`resident`). A loader whose runtime form cannot be read back answers with the
        digests of what it handed to the model, and its docstring says so.
        """
        return {name: tensor_digest(tensor) for name, tensor in self.resident()}


class TensorsLoader(WeightLoader):
    """Lands in named tensors: a module's parameters and persistent buffers, or the leaves of a TensorDict.

    Args:
        target: module, TensorDict or mapping of tensors.
        partial: accept updates that name only some of the tensors.
    """

    def __init__(self, target: Any, *, partial: bool = False) -> None:
        is_module = isinstance(target, nn.Module) and not is_tensordict_module(target)
        self._module = target if is_module else None
        self._target = ModuleSource(target) if is_module else MappingSource(target)
        self._partial = partial
        self._patcher: Patcher | None = None

    def targets(self) -> Mapping[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self._live()}

    def check(self, params: Iterable[ParamMeta]) -> None:
        live = dict(self._live())
        own = {name: ParamMeta.of(name, tensor) for name, tensor in live.items()}
        needed = {same_memory(tensor): name for name, tensor in reversed([*self._target._tensors()])}
        for meta in params:
            if meta.name not in own:
                raise ManifestError(f"the model has no parameter {meta.name!r}", state="nothing was changed")
            if own[meta.name] != meta:
                raise ManifestError(
                    f"parameter {meta.name!r} arrives as {meta}",
                    expected=str(own[meta.name]),
                    state="nothing was changed",
                )
            needed.pop(same_memory(live[meta.name]), None)  # tied tensors may come under any of their names
        if needed and not self._partial:
            raise ManifestError(
                f"{len(needed)} parameters of the model are missing from the update, first {min(needed.values())!r}",
                state="nothing was changed",
            )

    @torch.no_grad()
    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        targets = self.targets()
        for name, tensor in pairs:
            if name not in targets:
                raise ManifestError(f"the model has no parameter {name!r}")
            target = targets[name]
            if ParamMeta.of(name, target) != ParamMeta.of(name, tensor):
                raise ManifestError(
                    f"parameter {name!r} arrives as {ParamMeta.of(name, tensor)}",
                    expected=str(ParamMeta.of(name, target)),
                )
            if tensor.data_ptr() != target.data_ptr() or tensor.stride() != target.stride():
                target.copy_(tensor)
        self._patcher = None

    def forget(self) -> None:
        """Drop what was derived from the tensors as they lie in memory: they are about to move."""
        self._patcher = None

    def patchable(self, name: str) -> bool:
        return True

    def proof(self) -> str:
        return "in place"

    def position_digests(self) -> dict[str, str]:
        return {name: digest.hex() for name, (digest, _) in self._patches().held().items()}

    def stage(self, changes: Staging) -> None:
        from torchrl_ext.weights.landing import compare

        patcher = self._patches()
        compare({name: digest for name, (digest, _) in patcher.stage(changes).items()}, changes.digests)

    @torch.no_grad()
    def commit(self) -> None:
        self._patches().commit()

    def _patches(self) -> Patcher:
        """The parameters are looked up anew: training code may have put others in their place."""
        from torchrl_ext.weights.landing import Patcher, identity

        targets = self.targets()
        known = self._patcher
        same = known is not None and all(
            piece.destination.data_ptr() == targets[name].data_ptr() for name, (piece,) in known.pieces.items()
        )
        if known is None or not same:
            once = {meta.name for meta in self._target.params()}
            known = self._patcher = Patcher(identity({name: targets[name] for name in once}))
        return known

    def resident(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, full(tensor)) for name, tensor in self._live())

    def digests(self) -> dict[str, str]:
        live = [(name, tensor, same_memory(tensor)) for name, tensor in self._live()]
        once = {key: tensor for _, tensor, key in live}
        found = {key: tensor_digest(full(tensor)) for key, tensor in once.items()}
        return {name: found[key] for name, _, key in live}

    def _live(self) -> Iterable[tuple[str, Tensor]]:
        """Every tensor under each of its names; a module's non-persistent buffers may be sent, and need not be."""
        return self._target._tensors() if self._module is None else named_tensors(self._module, scratch=True)


def as_loader(target: Any) -> WeightLoader:
    """The loader for whatever a caller passes: a WeightLoader, a module, a TensorDict or a mapping.

    Raises:
        ConfigError: nothing can land in it.
    """
    if isinstance(target, WeightLoader):
        return target
    if isinstance(target, nn.Module) or is_mapping(target):
        return TensorsLoader(target)
    raise ConfigError(
        f"weights cannot land in a {type(target).__name__}",
        expected="an nn.Module, a TensorDict, a mapping of tensors or a WeightLoader",
    )
