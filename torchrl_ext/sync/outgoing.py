"""`Outgoing` is one update's pass over a source; `Ranks` and `bump` tell trainer ranks and collectors of its end."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_ext.errors import DeadlineError, ManifestError, NotConnectedError
from torchrl_ext.sync.parts import PartSource
from torchrl_ext.types import Info, ParamMeta, Part
from torchrl_ext.waiting import wait_until
from torchrl_ext.weights.derived import CastSource, RenamedSource, as_mapper, converted
from torchrl_ext.weights.digests import tensor_digest
from torchrl_ext.weights.shards.blocks import Shard, checked_shards
from torchrl_ext.weights.source import MappingSource, WeightSource, checked

__all__ = ["Outgoing", "Ranks", "bump"]

log = logging.getLogger("torchrl_ext")

_DEADLINE_S = 1800.0  # as long as torch's own ranks wait for each other in a gather over gloo
_SHORTEST_S, _LONGEST_S = 0.002, 0.1  # between two looks

_senders: Counter[str] = Counter()  # by a digest of the model's names, in this process


class Outgoing(WeightSource):
    """One update's pass over a source, which renames and casts tensors and takes their digests as they pass.

    Args:
        source: what is sent.
        registered: the registered model, of any kind, or None; a module's own names become those of its checkpoint.
        mapper: trainer name -> checkpoint name.
        dtype: cast of floating-point tensors.

    Attributes:
        version: the version as which it is sent.
        digesting: whether to take the digest of each tensor as it passes.
        digests: digest of each tensor that passed in the last iteration, by name; empty unless `digesting`.
        count, bytes: number and bytes of the tensors that passed in the last iteration, of it or of its `shards`, where
            a tensor passes on every rank and counts as a whole.
        model_bytes: bytes of all tensors, whether they are sent or not.
        whole: of what is sent where no part of it is.
        decided: the other trainer ranks were told whether a part is sent.
        told: the part of which workers are told before they get it; None where everything is sent.
        onto: says in a handoff which version the part that workers get builds on; empty without one.
        store: the store of torch's process group; None where this process is the only rank, and can make another pass
            by itself.

    Raises:
        ManifestError: a tensor is on the meta device: offloaded, or never loaded.
    """

    def __init__(
        self,
        source: WeightSource,
        registered: Any = None,
        *,
        mapper: Callable[[str], str] | Mapping[str, str] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if isinstance(source, MappingSource) and isinstance(registered, nn.Module):
            source = converted(source, registered)
        self._origin = source
        source = source if mapper is None else RenamedSource(source, as_mapper(mapper))
        self.whole = self._source = source if dtype is None else CastSource(source, dtype)
        self._params = self._source.params()
        self._gathers = self.digesting = self.decided = False
        self.told: Part | None = None
        self.onto: Info = {}
        self.digests: dict[str, str] = {}
        self._stream: Iterator[tuple[str, Tensor]] | None = None
        grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
        shared = grouped and torch.distributed.get_world_size() > 1
        self.store: Any | None = torch.distributed.distributed_c10d._get_default_store() if shared else None
        self.version = self.count = self.bytes = self.model_bytes = 0
        held, empty = source.held(), []
        for meta in self._params:
            self.model_bytes += meta.nbytes
            if meta.name not in held:
                self._gathers = True
            elif held[meta.name].device.type == "meta":
                empty.append(meta.name)
        if empty:
            raise ManifestError(
                f"{len(empty)} tensor(s) are on the meta device, which holds no data: {', '.join(empty[:3])}",
                state="nothing was sent",
                hint="load the weights, or bring offloaded ones back, before sending them",
            )

    def limit(self, part: Part | None, *, narrow: bool = True) -> None:
        """Send some tensors from the next pass on; with None, all of them.

        Args:
            part: which.
            narrow: a pass yields these alone, and workers are told; else a pass yields all, and `part` is there to be
                read.
        """
        self.part = part
        self.told = part if narrow else None
        self.onto = {} if self.told is None else {"onto": self.told.base}
        self._source = self.whole if part is None or not narrow else PartSource(self.whole, part)
        self._params = self._source.params()

    def params(self) -> tuple[ParamMeta, ...]:
        return self._params

    def own_names(self) -> list[str]:
        """Return the names as the trainer has them, before any mapper."""
        return [meta.name for meta in self._origin.params()]

    def held(self) -> Mapping[str, Tensor]:
        return self._source.held()

    def files(self) -> Mapping[str, bytes]:
        return self._source.files()

    def tied(self) -> Mapping[str, str]:
        return self._source.tied()

    def pairs(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield as `WeightSource.pairs`, and count; all tensors without ``names``."""
        if names is None:
            stream, params = iter(self._source), self._params
        else:
            stream, params = self._source.pairs(names), tuple(meta for meta in self._params if meta.name in names)
        self.digests, self.count, self.bytes = {}, 0, 0
        self._stream = stream
        for meta, tensor in checked(stream, params):
            if self.digesting:
                self.digests[meta.name] = tensor_digest(tensor)
            self.count, self.bytes = self.count + 1, self.bytes + meta.nbytes
            yield meta.name, tensor

    __iter__ = pairs

    def shards(self) -> Iterator[Shard]:
        """Yield the blocks that this rank holds, once they are found to be sound, and count what they are parts of.

        Raises:
            ManifestError: as `checked_shards`.
        """
        self.digests, self.count, self.bytes = {}, 0, 0
        for meta, held in checked_shards(self._source.shards(), self._params):
            self.count, self.bytes = self.count + 1, self.bytes + meta.nbytes  # other ranks have the rest of it
            yield from held

    def _begin(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._source) if self.part is None else self._source.pairs(self.part.names)

    def replay(self) -> None:
        for _ in self._begin() if self._gathers else ():
            pass

    def drain(self) -> None:
        """Finish a pass, or make one that never began, where other ranks wait in its gathers.

        One that cannot be finished is logged, not raised: the caller has an error of its own to raise.
        """
        if self.store is None or not self._gathers:
            return
        try:
            for _ in self._begin() if self._stream is None else self._stream:
                pass
        except Exception:
            log.warning("other trainer ranks may wait for this one, which cannot finish its pass", exc_info=True)


class Ranks:
    """Tells the trainer ranks that only take part in the gathers how an update ended, through torch's store.

    It is no collective: the rank that drives writes the result however its update ends, and waits for nobody. Senders
    of the same model are matched across ranks by the order in which each process first used them, so that ranks that
    do not drive need not be given the transport, the mapper or the engine.
    """

    def __init__(self) -> None:
        self._name = ""
        self._updates = 0

    def tell(self, source: Outgoing, store: Any, version: int, accepted: bool) -> None:
        """Tell the other ranks that the update that sent ``source`` is over, and which version the engines serve now.

        A store that is gone is logged, not raised.
        """
        try:
            store.set(self._next(source), f"{version} {int(accepted)}")
        except RuntimeError as error:
            log.warning("the other trainer ranks were not told of weights version %d: %s", version, error)

    def hear(self, source: Outgoing, store: Any) -> tuple[int, bool]:
        """Wait until the update that sends ``source`` is over.

        Returns:
            The version that the engines serve now, and whether this update put it in service.

        Raises:
            DeadlineError: the rank that drives said nothing within 30 minutes.
            NotConnectedError: torch's store is gone.
        """
        version, accepted = self._heard(self._next(source), store).split()
        return int(version), accepted == "1"

    def _heard(self, update: str, store: Any) -> str:
        try:
            wait_until(
                lambda: store.check([update]),
                _DEADLINE_S,
                lambda: DeadlineError(
                    f"trainer rank 0 did not say within {_DEADLINE_S:g} s what became of an update",
                    expected="update_weights on every trainer rank, the same number of times",
                    state="this rank does not know which version the engines serve",
                    hint="look at rank 0; make the same senders in the same order on every rank",
                ),
                shortest_s=_SHORTEST_S,
                longest_s=_LONGEST_S,
            )
            return str(store.get(update).decode())
        except DeadlineError:
            raise
        except RuntimeError as error:
            raise NotConnectedError(
                f"the store of torch's process group is gone: {error}",
                state="this rank does not know which version the engines serve",
                hint="look at trainer rank 0, which keeps it as a rule",
            ) from error

    def tell_part(self, source: Outgoing, store: Any) -> None:
        """Tell the other ranks, before the first gather, whether the update that begins sends a part.

        A store that is gone is logged, not raised.
        """
        told = "" if source.part is None else str(source.part.base)
        try:
            store.set(f"{self._next(source)}/part", told)
        except RuntimeError as error:
            log.warning("the other trainer ranks were not told which weights are sent: %s", error)
        self._updates -= 1

    def hear_part(self, source: Outgoing, store: Any) -> int | None:
        """Wait until it is known whether the update that begins sends a part.

        Returns:
            The version that the part builds on; None where everything is sent.

        Raises:
            DeadlineError, NotConnectedError: as `hear`.
        """
        told = self._heard(f"{self._next(source)}/part", store)
        self._updates -= 1
        return int(told) if told else None

    def skip(self) -> None:
        """Count an update of which this rank need not hear: it knows that it failed."""
        self._updates += 1

    def _next(self, source: Outgoing) -> str:
        """Return the store's key for this sender's next update; the same on every rank."""
        if not self._name:
            model = hashlib.sha256("\n".join(sorted(source.own_names())).encode()).hexdigest()[:32]
            self._name = f"torchrl_ext/{model}/{_senders[model]}"
            _senders[model] += 1
        self._updates += 1
        return f"{self._name}/{self._updates}"


def bump(collectors: Iterable[Callable[[], Any]]) -> None:
    """Increment the policy version of each collector once.

    Args:
        collectors: references that return a collector, or None where it is gone.

    The engines have the weights by then, so a collector that raises is logged, and the others are told all the same.
    """
    seen: set[int] = set()
    for known in collectors:
        collector = known()
        if collector is None or id(collector) in seen:  # not its truth: endless ones have no length
            continue
        seen.add(id(collector))
        try:
            collector.increment_version()
        except Exception:
            log.error("a collector did not take note of new weights, which are in service", exc_info=True)
