"""The base of loaders into engines that process their weights: it rehearses the route of an update."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from torchrl_ext.errors import EngineRefusedError, IntegrityError
from torchrl_ext.landing.loader import Patchable, Rehearsable, Sliceable, WeightLoader
from torchrl_ext.landing.placement import Landing
from torchrl_ext.landing.sliced import Sliced
from torchrl_ext.proof.rehearsal import IN_PLACE, REFUSED, UNPROVEN, Rehearsal, rehearse
from torchrl_ext.proof.runtime import Reading
from torchrl_ext.types import Info

__all__ = ["EngineLoader"]

_NAMED = 5  # layers that an error lists


class EngineLoader(WeightLoader, Patchable, Sliceable, Rehearsable):
    """A loader into a model that an engine has processed, whose route can be rehearsed.

    Attributes:
        touched: something was loaded after the weights that the engine was started with.
        repairs: steps that `finish` and `commit` take after the engine's own processing, by name.
        vouches: digests of what is loaded will be asked for.
        takes_slices: the transport brings slices of tensors (`torchrl_ext.landing.sliced`).
    """

    def __init__(self) -> None:
        self.touched, self.vouches = False, True
        self.repairs: frozenset[str] = frozenset(self.known_repairs())
        self.takes_slices = False
        self._rehearsals: dict[bool, Rehearsal] = {}  # by whether slices came
        self._rehearsing = False

    # what an engine's loader says of its model

    def known_repairs(self) -> Sequence[str]:
        """Return the names of steps that the engine's own reload leaves out, as far as these are known."""
        return ()

    @abstractmethod
    def start_weights(self) -> Iterable[tuple[str, Tensor]] | None:
        """Return a new pass over the checkpoint that the engine was started with; None where there is none.

        Its tensors are named as in an update.
        """

    @abstractmethod
    def runtime(self) -> Iterator[Reading]:
        """Yield every tensor that this worker computes with (`torchrl_ext.proof.runtime.reachable`)."""

    @abstractmethod
    def landings(self, name: str) -> Iterable[Landing]:
        """Return the copies of a checkpoint tensor into runtime parameters (`Reading.key`) of this worker."""

    @abstractmethod
    def kernel(self, layer: str) -> str:
        """Name what computes in the module at ``layer``, for messages."""

    @abstractmethod
    def ready(self) -> None:
        """Take the parameters of the start checkpoint, if there is one, where no trainer has named its own yet."""

    @abstractmethod
    def land_whole(self) -> None:
        """Land changes by loading the whole model from now on."""

    def repaired(self) -> Mapping[str, str]:
        """Return the repairs that the last load needed, by layer."""
        return {}

    def as_sent(self, pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors as the transport would hand them over; used between `start` and `finish`."""
        slices, targets = (self.slices(), self.targets()) if self.takes_slices else ({}, {})
        for name, tensor in pairs:
            blocks = slices.get(name)
            if blocks is None:
                yield name, tensor
            elif blocks:
                into = targets.get(name)
                yield name, Sliced.cut(name, tensor, blocks, into if isinstance(into, Sliced) else None)

    # what the receiver asks

    def by_slices(self, wanted: bool) -> None:
        self.takes_slices = wanted

    @property
    def _rehearsed(self) -> Rehearsal | None:
        """The rehearsal of the current route, or the one after which the engine could not be restored."""
        lost = next((found for found in self._rehearsals.values() if not found.restored), None)
        return lost or self._rehearsals.get(self.takes_slices)

    def vouch(self, wanted: bool) -> None:
        self.vouches = wanted

    def proof(self) -> str:
        """Return ``"in place"`` or ``"rehearsed"`` if a rehearsal showed that of every layer, else ``"sent"``."""
        if self._rehearsed is None:
            return "sent"
        verdicts = {layer.verdict for layer in self._rehearsed.layers}
        if verdicts & {UNPROVEN, REFUSED}:
            return "sent"
        return "in place" if verdicts <= {IN_PLACE} else "rehearsed"

    def unrehearsed(self, *, again: bool = False) -> bool:
        return (self._rehearsed is None or again) and not self._why_not()

    def _why_not(self) -> str:
        """Return why no rehearsal is possible; "" if one is."""
        if self.touched:
            return "the engine no longer holds the weights that it was started with: start it again"
        return "the engine was started without a checkpoint" if self.start_weights() is None else ""

    def rehearsal(self) -> Info:
        return {"why": self._why_not()} if self._rehearsed is None else self._rehearsed.to_json()

    @torch.no_grad()
    def rehearse(self) -> Info:
        """Rehearse the route of an update on the idle model, which holds what it was started with; return the result.

        Raises:
            EngineRefusedError: a layer does not come back to what a cold start makes of it; nothing of the trainer's
                was loaded, and the engine serves what it served.
            IntegrityError: the same, and the engine could not be brought back: it has to be started again.
        """
        self.ready()
        if self._why_not():
            return self.rehearsal()
        self._rehearsing = True
        try:
            found = self._rehearsals[self.takes_slices] = rehearse(self)
        finally:
            self._rehearsing = False
        self.touched = not found.restored
        self.refuse_unsound()
        return found.to_json()

    def refuse_unsound(self, *, unproved: bool = False) -> None:
        """Raise where a rehearsal showed that an update would go wrong.

        Args:
            unproved: the trainer accepts that nothing is proved; not of an engine that was not brought back.

        Raises:
            EngineRefusedError, IntegrityError: see `rehearse`.
        """
        found = self._rehearsed
        if found is None or not found.refused or (unproved and found.restored):
            return
        named = "; ".join(f"{layer.name} ({layer.kernel}): {layer.why}" for layer in found.refused[:_NAMED])
        what = f"an update would leave {len(found.refused)} layer(s) of this engine wrong: {named}"
        expected = "every tensor that the engine computes with as a cold start from the same weights makes it"
        if not found.restored:
            raise IntegrityError(
                what,
                expected=expected,
                state="the engine stays paused: it holds something else than it was started with",
                hint="start the engine again, with another kernel backend if it has one for this layer",
            )
        raise EngineRefusedError(
            what,
            expected=expected,
            state="no weight of the trainer was loaded; the engine serves what it served",
            hint="start it with another kernel backend for this layer, or report the layer and the engine's version; "
            "rehearse='never' sends all the same, and then no update is called verified",
        )
