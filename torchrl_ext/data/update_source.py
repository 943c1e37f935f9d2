"""`UpdateSource` wraps the source of one update, and `named` checks names of its tensors."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from torchrl_ext.base.errors import ManifestError
from torchrl_ext.base.types import ParamMeta, Part
from torchrl_ext.data.group.ranks import torch_group
from torchrl_ext.data.weights.blocks import Shard, checked_shards
from torchrl_ext.data.weights.derived import MappedSource
from torchrl_ext.data.weights.digests import Digests
from torchrl_ext.data.weights.source import FiniteCheck, WeightSource, checked

__all__ = ["UpdateSource", "named"]

log = logging.getLogger("torchrl_ext")


class UpdateSource(WeightSource):
    """The source of one update, which renames, casts, checks and digests tensors.

    Args:
        source: the weights to send.
        mapper: trainer name -> checkpoint name.
        dtype: cast floating-point tensors to this dtype.
        narrow: whether a partial update yields only its tensors; if False, it yields all tensors, and `part` says which
            of them may differ from its base.

    Attributes:
        only: names of the tensors that may differ from the last update; None for all.
        version: the version number of the update.
        count, bytes: number and bytes of the tensors in the last iteration, over this source or its `shards`; a sharded
            tensor counts as a whole on every rank.
        model_bytes: bytes of all tensors, including those that are not sent.
        whole: the source of all tensors, including those that are not sent.

    Raises:
        ManifestError: a tensor is on the meta device (offloaded, or never loaded).
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        mapper: Callable[[str], str] | None = None,
        dtype: torch.dtype | None = None,
        narrow: bool = True,
    ) -> None:
        mapped = mapper is not None or dtype is not None
        self.whole = MappedSource(source, rename=mapper, dtype=dtype) if mapped else source
        self.only: frozenset[str] | None = None
        self._narrow = narrow
        self._names: frozenset[str] | None = None  # names of the tensors that iteration yields; None for all
        self._params = self._all = self.whole.params()
        self._checked: Collection[str] | None = None  # names of tensors that `FiniteCheck` has seen; None before it
        self._digesting, self._ahead, self._coming = False, Digests(), Digests()
        self._held: Mapping[str, Tensor] = {}  # digested ahead
        self.version = 0
        self._stream: Iterator[tuple[str, Tensor]] | None = None
        self.count = self.bytes = 0
        self.model_bytes = sum(meta.nbytes for meta in self._params)
        held = source.held()
        self._gathers = any(meta.name not in held for meta in (source.params() if mapped else self._params))
        empty = [name for name, tensor in held.items() if tensor.device.type == "meta"]
        if empty:
            raise ManifestError(
                f"{len(empty)} tensor(s) are on the meta device, which holds no data: {', '.join(empty[:3])}",
                state="nothing was sent",
                hint="load the weights, or reload offloaded ones, before sending them",
            )

    def limit(self, base: int | None) -> None:
        """From the next iteration on, send only the tensors in `only`, on top of version ``base``, or all for None."""
        self.part = None if base is None or self.only is None else Part(base=base, names=self.only)
        self._stream, self._names = None, self.only if self.part is not None and self._narrow else None
        self._params = self._all if self._names is None else tuple(m for m in self._all if m.name in self._names)

    def require_finite(self) -> None:
        """Refuse NaN and infinity: in tensors that this process holds now, in all others as they are made.

        Raises:
            ManifestError: names a tensor with one; iteration raises it from now on, too.
        """
        held = {name: tensor for name, tensor in self.held().items() if self.only is None or name in self.only}
        check = FiniteCheck()
        for name, tensor in held.items():
            check.add(name, tensor)
        check.settle()
        self._checked = held.keys()

    def digest(self, wanted: bool) -> None:
        """Set whether `digests` are taken of the tensors to send: now of those that this process holds, and of all
        others as iteration makes them, since engines are paused while most transports iterate.
        """
        self._digesting, self._ahead, self._coming = wanted, Digests(), Digests()
        self._held = self.held() if wanted else {}
        for name, tensor in self._held.items():
            self._ahead.add(name, tensor)
        self._ahead.launch()

    @property
    def digests(self) -> dict[str, str]:
        """The digests of the tensors to send, by name, once they were iterated over; none unless `digest` wants them.

        Waits for those that are computed on an accelerator.
        """
        return {**self._ahead.hex(), **self._coming.hex()}

    def _sends(self, name: str) -> bool:
        return self._names is None or name in self._names

    def params(self) -> tuple[ParamMeta, ...]:
        return self._params

    def held(self) -> Mapping[str, Tensor]:
        return {name: tensor for name, tensor in self.whole.held().items() if self._sends(name)}

    def files(self) -> Mapping[str, bytes]:
        return self.whole.files()

    def tied(self) -> Mapping[str, str]:
        return self.whole.tied()

    def pairs(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield as `WeightSource.pairs`, and update `count`, `bytes` and `digests`; None yields all tensors to send."""
        names = self._names if names is None else names
        stream = self._stream = iter(self.whole) if names is None else self.whole.pairs(names)
        check, coming = FiniteCheck(), Digests()
        self._coming = coming
        self.count = self.bytes = 0
        for meta, tensor in checked(stream, (meta for meta in self._params if names is None or meta.name in names)):
            if self._checked is not None and meta.name not in self._checked:
                check.add(meta.name, tensor)
            if self._digesting and meta.name not in self._held:
                coming.add(meta.name, tensor)
            self.count, self.bytes = self.count + 1, self.bytes + meta.nbytes
            yield meta.name, tensor
        check.settle()
        coming.launch()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.pairs()

    def shards(self) -> Iterator[Shard]:
        """Yield this rank's blocks, and update `count` and `bytes`; raises ManifestError as `checked_shards` does."""
        self.count = self.bytes = 0
        for meta, held in checked_shards(self._sent(), self._params):
            self.count, self.bytes = self.count + 1, self.bytes + meta.nbytes  # other ranks have the other blocks
            yield from held

    def _sent(self) -> Iterator[Shard]:
        """Yield the shards to send; a shard that gathers first gathers the skipped ones before it, as all ranks do."""
        left_out: list[Shard] = []
        for shard in self.whole.shards():
            if self._sends(shard.meta.name):
                yield replace(shard, take=partial(self._take, shard, left_out if shard.gathers else []))
                left_out = [] if shard.gathers else left_out
            elif shard.gathers:
                left_out.append(shard)

    def _take(self, shard: Shard, before: Sequence[Shard]) -> Tensor:
        for one in before:
            one.take()
        tensor = shard.take()
        if self._checked is not None and shard.meta.name not in self._checked:
            check = FiniteCheck()
            check.add(shard.meta.name, tensor.to(shard.meta.dtype))  # a cast may make infinities
            check.settle()
        return tensor

    def _begin(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.whole) if self.part is None else self.whole.pairs(self.part.names)

    def replay(self) -> None:
        for _ in self._begin() if self._gathers else ():
            pass

    def drain(self) -> None:
        """Finish the current iteration, or run a whole one, because other ranks may wait in its gathers.

        An error is logged, not raised, because the caller is already handling one.
        """
        if not self._gathers or torch_group().size == 1:
            return
        try:
            for _ in self._begin() if self._stream is None else self._stream:
                pass
        except Exception:
            log.warning("other trainer ranks may wait for this one, which cannot finish its pass", exc_info=True)


def named(only: Collection[str], source: WeightSource) -> frozenset[str]:
    """Return the names by which a source sends some of its tensors.

    Args:
        only: their names, or a single one; the name of a tied tensor means the tensor that is sent for it.
        source: the source that is sent.

    Raises:
        ManifestError: it sends no tensor of such a name, or ``only`` is empty.
    """
    sent = {**source.tied(), **{meta.name: meta.name for meta in source.params()}}
    names = {only} if isinstance(only, str) else {*only}
    unknown = sorted(names - sent.keys())
    if unknown or not names:
        close = difflib.get_close_matches(unknown[0], sent, n=1, cutoff=0.0) if unknown else []
        raise ManifestError(
            f"no tensor of the update is called {unknown[0]!r}" if unknown else "only= names no tensor",
            expected=f"names such as {close[0]!r}" if close else "names of tensors, as they are sent",
            state="nothing was sent",
        )
    return frozenset(sent[name] for name in names)
