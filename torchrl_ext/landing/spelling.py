"""The names under which a module takes weights: its own, those of its checkpoint, or both in one update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import final

import torch
from torch import Tensor

from torchrl_ext.errors import ManifestError
from torchrl_ext.types import ParamMeta, cast_hint
from torchrl_ext.weights.groups import Group
from torchrl_ext.weights.source import full, is_distributed, same_memory

__all__ = ["Spelling"]


@final
class Spelling:
    """The tensors of a module, or of a mapping, under the names of an update.

    Args:
        own: every live tensor under each of its own names.
        groups: how some of them become checkpoint tensors.
        sent: the names of the update; None: every name of the checkpoint.

    Attributes:
        places: name -> live tensor, detached, or a view of one that is a part of it.
        copied: name -> group, for checkpoint tensors that are no part of one live tensor.
        source_of: name in ``places`` -> name of the live tensor that it is, or is a part of.
    """

    def __init__(self, own: Mapping[str, Tensor], groups: Iterable[Group], sent: frozenset[str] | None = None) -> None:
        self._own, self._sent = own, sent
        self._group_of: dict[str, Group] = {}
        self._results: dict[str, Group] = {}
        for group in groups:  # a part of a shard is no view of it: sharded modules take their own names
            if not any(is_distributed(own[name]) for name in group.sources):
                self._group_of |= dict.fromkeys(group.sources, group)
                self._results |= dict.fromkeys(group.results, group)
        plain = own.keys() - self._group_of.keys()
        self._checkpoint = sent is None or sent <= plain | self._results.keys()
        self.places: dict[str, Tensor] = {}
        self.copied: dict[str, Group] = {}
        self.source_of: dict[str, str] = {}
        for name, tensor in own.items():
            of = self._group_of.get(name)
            if of is None or self._takes_own(name):
                self.places[name], self.source_of[name] = tensor.detach(), name
            if of is not None and not of.copied:
                parts = {part: view for part, view in of.parts(tensor.detach()).items() if self._takes_result(part)}
                self.places |= parts
                self.source_of |= dict.fromkeys(parts, name)
        for name, group in self._results.items():
            if group.copied and self._takes_result(name):
                self.copied[name] = group

    def _takes_own(self, name: str) -> bool:
        """Return whether the update means the live tensor of a group by this name."""
        return not self._checkpoint and self._sent is not None and name in self._sent

    def _takes_result(self, name: str) -> bool:
        """Return whether the update means a checkpoint tensor by this name."""
        return self._checkpoint or (name in (self._sent or ()) and name not in self._own)

    def check(self, params: Iterable[ParamMeta], needed: Mapping[str, Tensor], *, partial: bool) -> None:
        """Refuse an update that cannot land.

        Args:
            params: the update.
            needed: live tensors that have to come, by name; tied ones under any of their names.
            partial: nothing has to come.

        Raises:
            ManifestError: names a parameter that is unknown, missing, given twice, or of another shape or dtype.
        """
        known = self._metas()
        for meta in params:
            if meta.name not in known:
                raise ManifestError(f"the model has no parameter {meta.name!r}", state="nothing was changed")
            own = known[meta.name]
            if own != meta:
                raise ManifestError(
                    f"parameter {meta.name!r} arrives as {meta}",
                    expected=str(own),
                    state="nothing was changed",
                    hint=cast_hint(own.dtype) if own.shape == meta.shape else None,
                )
        given = {meta.name for meta in params}
        absent = self._absent(given)
        missing = {same_memory(tensor): name for name, tensor in reversed([*needed.items()])}
        for name, tensor in self._own.items():
            if name not in absent:
                missing.pop(same_memory(tensor), None)
        if missing and not partial:
            raise ManifestError(
                f"{len(missing)} parameters of the model are missing from the update, "
                f"first {min(absent[name] for name in missing.values())!r}",
                state="nothing was changed",
            )

    def _metas(self) -> dict[str, ParamMeta]:
        copied = set(self.copied.values())
        found = {meta.name: meta for group in copied for meta in group.params(self._own)}
        return found | {name: ParamMeta.of(name, tensor) for name, tensor in self.places.items()}

    def _absent(self, given: set[str]) -> dict[str, str]:
        """Return for each live tensor that does not come whole the first name of it that is missing."""
        absent = {name: name for name in self._own if name not in self._group_of and name not in given}
        for group in {*self._group_of.values()}:
            direct = {name for name in group.sources if name in given and self._takes_own(name)}
            parts = {name for name in group.results if name in given and self._takes_result(name)}
            if direct and parts:
                raise ManifestError(
                    f"{min(direct)!r} is given twice: by itself, and as {min(parts)!r}", state="nothing was changed"
                )
            left = [name for name in group.results if name not in parts]
            if direct or left:
                said = left[0] if self._checkpoint or parts else None
                absent |= {name: said or name for name in group.sources if name not in direct}
        return absent

    def require_together(self, names: frozenset[str]) -> None:
        """Refuse names of which the model takes some only together with others.

        Raises:
            ManifestError: the model takes no such name, or one without which another does not land.
        """
        for name in sorted(names):
            if name not in self.places and name not in self.copied:
                raise ManifestError(f"the model has no parameter {name!r}", state="nothing was changed")
            left = self.copied[name].results.keys() - names if name in self.copied else ()
            if left:
                raise ManifestError(
                    f"{name!r} lands together with {min(left)!r}, which did not come with it",
                    state="nothing was changed; the engine serves what it served",
                    hint="name both in only=",
                )

    def assembled(self, names: frozenset[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint tensors that are no part of a live one, made from what is live now.

        Args:
            names: those of which a group has to have one; None for all.
        """
        for group in dict.fromkeys(self.copied.values()):
            if names is not None and names.isdisjoint(group.results):
                continue
            yield from group.undo({name: full(self._own[name]) for name in group.sources}).items()

    @torch.no_grad()
    def assemble(self, tensors: Mapping[str, Tensor]) -> None:
        """Write live tensors from the checkpoint tensors that they are made of; the inverse of `assembled`.

        Raises:
            ManifestError: some tensors of a group are missing, or cannot be turned into live ones.
        """
        for group in dict.fromkeys(map(self.copied.__getitem__, tensors)):
            left = [name for name in group.results if name not in tensors]
            if left:
                raise ManifestError(f"{left[0]!r} is missing from the update, which has others of its group")
            group.redo(self._own, tensors)
