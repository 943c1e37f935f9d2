"""`Outgoing` is one update's pass over a source; `Ranks` and `bump` tell trainer ranks and collectors of its end."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torchrl_ext.deadline import wait_until
from torchrl_ext.errors import DeadlineError, ManifestError
from torchrl_ext.sync.only import PartSource
from torchrl_ext.transports.ranks import shared_store, store_gone
from torchrl_ext.types import Info, ParamMeta, Part
from torchrl_ext.weights.derived import CastSource, RenamedSource, as_mapper
from torchrl_ext.weights.digests import tensor_digest
from torchrl_ext.weights.shards.blocks import Shard, checked_shards
from torchrl_ext.weights.source import WeightSource, checked

__all__ = ["Outgoing", "Ranks", "bump"]

log = logging.getLogger("torchrl_ext")

_PHASES = 30  # for how many timeouts a rank waits for rank 0: an update has phases, each with its own deadline
_SHORTEST_S, _LONGEST_S = 0.002, 0.1  # between two looks

_REMEMBERED = 64  # updates

_senders: Counter[str] = Counter()  # by a digest of the model's names, in this process


class Outgoing(WeightSource):
    """One update's pass over a source, which renames and casts tensors and takes their digests as they pass.

    Args:
        source: what is sent.
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
        begins: waits until rank 0 gathers too; returns False where it never will.
        store: the store of torch's process group; None where this process is the only rank, and can make another pass
            by itself.

    Raises:
        ManifestError: a tensor is on the meta device: offloaded, or never loaded.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        mapper: Callable[[str], str] | Mapping[str, str] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        source = source if mapper is None else RenamedSource(source, as_mapper(mapper))
        self.whole = self._source = source if dtype is None else CastSource(source, dtype)
        self._params = self._source.params()
        self._gathers = self.digesting = self.decided = False
        self.told: Part | None = None
        self.onto: Info = {}
        self.begins: Callable[[], bool] = lambda: True
        self.digests: dict[str, str] = {}
        self._stream: Iterator[tuple[str, Tensor]] | None = None
        self.store = shared_store()
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
        for _ in self._begin() if self._gathers and self.begins() else ():
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
    """Tells the trainer ranks that only take part in the gathers how an update goes, through torch's store.

    It is no collective: the rank that drives says what holds however its update ends, and waits for nobody. Every call
    of `update_weights` counts on every rank from its beginning on, whatever it fails with. The store keeps the words of
    the last updates, for ranks that lag behind. Senders of the same model are matched across ranks by the order in
    which each process first used them, so that ranks that do not drive need not be given the transport, the mapper or
    the engine.

    Args:
        timeout_s: deadline of one phase of an update, in seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = _PHASES * timeout_s
        self._name = self._model = ""
        self._calls = self._accepted = 0
        self.shared = False  # with other ranks, as of the last call
        self._said: dict[str, deque[list[Any]]] = {}

    def call(self) -> None:
        """Count a call of `update_weights`, before anything in it can fail."""
        self._calls, self._model, self.shared = self._calls + 1, "", shared_store() is not None

    def join(self, source: Callable[[], WeightSource]) -> None:
        """Say which model this call sends; by the names of its tensors other ranks find this sender when it speaks."""
        if not self._name and not self._model:
            names = sorted(meta.name for meta in source().params())
            self._model = hashlib.sha256("\n".join(names).encode()).hexdigest()[:32]

    def _key(self, what: str) -> str:
        if not self._name:
            self._name = f"torchrl_ext/{self._model}/{_senders[self._model]}"
            _senders[self._model] += 1
        return f"{self._name}/{what}"

    # the rank that drives

    def begin(self) -> None:
        """Let the other ranks begin: this one is ready to gather."""
        self._tell("begun", True)

    def tell_part(self, part: Part | None) -> None:
        """Say, before the first gather, which version a part builds on; None where everything is sent."""
        self._tell("part", None if part is None else part.base)

    def end(self, version: int, *, begun: bool, accepted: bool) -> None:
        """Say which version the engines serve now that this update is over, and whether it put that in service."""
        if not begun:
            self._tell("begun", False)
        self._accepted += accepted
        self._tell("end", version, self._accepted)

    def _tell(self, what: str, *words: Any) -> None:
        """Put the words under a key; a store that is gone is logged, not raised."""
        store = shared_store()
        if store is None or not (self._name or self._model):  # of weights that are none
            return
        said = self._said.setdefault(what, deque(maxlen=_REMEMBERED))
        said.append([self._calls, *words])
        try:
            store.set(self._key(what), json.dumps(list(said)))
        except RuntimeError as error:
            log.warning("the other trainer ranks were not told how an update goes: %s", error)

    # the other ranks; each method raises DeadlineError where rank 0 says nothing, NotConnectedError without a store

    def begins(self) -> bool:
        """Wait until rank 0 is ready to gather; return False where it failed before."""
        return self._heard("begun", True)[0] is True

    def hear_part(self) -> int | None:
        """Wait until it is known whether a part is sent, and return the version on which it builds; else None."""
        base = self._heard("part", None)[0]
        return None if base is None else int(base)

    def ended(self, version: int) -> tuple[int, int]:
        """Wait until the update is over, and return the version that the engines serve now (``version`` where no store
        is shared), and how many updates were accepted since this was called last."""
        version, accepted = self._heard("end", version, self._accepted + 1)
        news, self._accepted = accepted - self._accepted, accepted
        return int(version), int(news)

    def _heard(self, what: str, *alone: Any) -> list[Any]:
        """Return the words of rank 0 on this call, or on a later one; ``alone`` where no store is shared."""
        store = shared_store()
        if store is None:
            return list(alone)
        key = self._key(what)

        def look() -> list[Any]:
            said = json.loads(store.get(key)) if store.check([key]) else []
            return next((words for call, *words in said if call >= self._calls), [])

        try:
            return wait_until(
                look,
                self._timeout_s,
                lambda: DeadlineError(
                    f"trainer rank 0 did not say within {self._timeout_s:g} s how an update goes",
                    expected="update_weights on every trainer rank, the same number of times",
                    state="this rank does not know which version the engines serve",
                    hint="look at rank 0; make the same senders in the same order on every rank",
                ),
                shortest_s=_SHORTEST_S,
                longest_s=_LONGEST_S,
            )
        except DeadlineError:
            raise
        except RuntimeError as error:
            raise store_gone(error) from error


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
