"""Check that a second load brings everything that an engine computes with to where its start brought it.

An engine loads once when it starts, and its kernels may keep the weights in any form. What a later load leaves
behind is not specified: a packed copy stays as it was, a shuffled one is overwritten with rows as they came. So before
the first update, while the engine is paused and holds the weights that it was started with, the very route of an update
is tried with weights that are known:

1. a digest of every tensor that can be reached (`torchrl_ext.engines.runtime`) is noted: the cold start;
2. the start checkpoint is loaded with something changed in each tensor: every place where one lands must differ;
3. the changes are taken back as a delta would take them: all must be as in the cold start, bit for bit;
4. the start checkpoint itself is loaded whole: the same again.

A loader that fails in 2 or 4 is refused, with the layers' names. One that fails in 3 only lands changes as whole loads
from then on. Where workers get slices, so do these loads; one that fails with slices in live memory is tried again with
all of them through the model's loader.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchrl_ext.base.errors import EngineRefusedError, IntegrityError, WeightSyncError
from torchrl_ext.base.types import Info, ParamMeta
from torchrl_ext.data.deltas.bits import flat_bits
from torchrl_ext.data.deltas.streams import StreamPatch
from torchrl_ext.data.deltas.table import ParamTable, units
from torchrl_ext.data.landing.loader import Patchable, Sliceable, WeightLoader
from torchrl_ext.data.landing.patcher import Changes
from torchrl_ext.data.landing.placement import Landing
from torchrl_ext.data.landing.sliced import Sliced
from torchrl_ext.data.weights.digests import Digests, PositionDigest, as_digests
from torchrl_ext.engines import runtime
from torchrl_ext.engines.runtime import Reading

__all__ = ["Layer", "Rehearsal", "Rehearsed", "rehearse"]

log = logging.getLogger("torchrl_ext")

_NAMED = 5  # layers that an error lists
_MOST = 10  # rows of a summary


class Rehearsed(WeightLoader, Patchable, Sliceable):
    """The loader whose road is rehearsed: `torchrl_ext.engines.loader.EngineLoader`.

    Attributes:
        model: a `torchrl_ext.engines.loader.EngineModel`.
        repaired: the repairs that the last load made, by layer.
        takes_slices: whether the transport sends slices of tensors (`torchrl_ext.data.landing.sliced`).
    """

    model: Any
    repaired: dict[str, str]
    takes_slices: bool

    @abstractmethod
    def start_weights(self) -> Iterable[tuple[str, Tensor]] | None:
        """Return a new pass over the engine's start weights, under an update's names; None if unknown."""

    @abstractmethod
    def landings(self, name: str) -> tuple[Landing, ...]:
        """Return the copies of a checkpoint tensor into runtime parameters (`Reading.key`) of this worker."""

    @abstractmethod
    def land_whole(self) -> None:
        """From now on, apply changes by loading the whole model."""

    @abstractmethod
    def targets(self) -> Mapping[str, Sliced]:
        """Return the live memory of tensors that need no model loader, after a `start` that accepts slices."""


IN_PLACE, BY_RELOAD, REPAIRED, UNPROVEN, REFUSED = "in place", "by reload", "repaired", "unproven", "refused"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The verdict of a rehearsal on one layer.

    Attributes:
        name: path of the module.
        kernel: what computes in it.
        verdict: ``"in place"`` (every element is written where the placement says), ``"by reload"`` (the engine's own
            processing restores it), ``"repaired"`` (that, and a further step), ``"unproven"`` (it keeps more objects
            than are searched for tensors) or ``"refused"``.
        why: the step, or what is wrong.
    """

    name: str
    kernel: str
    verdict: str
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The result of a rehearsal.

    Attributes:
        layers: one verdict per layer in which a checkpoint tensor lands.
        repairs: steps that the model had to take after a load.
        changes: ``"in place"`` where changes may be written element by element, ``"by reload"`` where not.
        restored: the engine holds what it was started with.
    """

    layers: tuple[Layer, ...] = ()
    repairs: tuple[str, ...] = ()
    changes: str = IN_PLACE
    restored: bool = True

    @property
    def refused(self) -> tuple[Layer, ...]:
        """The layers that the route of an update does not bring to where a cold start brings them."""
        return tuple(layer for layer in self.layers if layer.verdict == REFUSED)

    @property
    def proof(self) -> str:
        """``"in place"`` or ``"rehearsed"`` if that was shown of every layer, else ``"sent"``."""
        verdicts = {layer.verdict for layer in self.layers}
        if verdicts & {UNPROVEN, REFUSED}:
            return "sent"
        return "in place" if verdicts <= {IN_PLACE} else "rehearsed"

    def refusal(self) -> WeightSyncError:
        """Return why the engine takes no update, where layers are refused.

        Returns:
            An EngineRefusedError where the engine was brought back to what it served, with nothing of the trainer's
            loaded; an IntegrityError where it could not be, and has to be started again.
        """
        named = "; ".join(f"{layer.name} ({layer.kernel}): {layer.why}" for layer in self.refused[:_NAMED])
        what = f"an update would leave {len(self.refused)} layer(s) of this engine wrong: {named}"
        expected = "every tensor that the engine computes with equal to a cold start's from the same weights"
        if not self.restored:
            return IntegrityError(
                what,
                expected=expected,
                state="the engine stays paused, because it no longer holds the weights that it was started with",
                hint="start the engine again, with another kernel backend if it has one for this layer",
            )
        return EngineRefusedError(
            what,
            expected=expected,
            state="no weight of the trainer was loaded; the engine still serves its previous weights",
            hint="start it with another kernel backend for this layer, or report the layer and the engine's version; "
            "rehearse='never' sends the weights anyway, but no update then counts as verified",
        )

    def to_json(self) -> Info:
        """Return a JSON-safe summary, with at most ten groups of layers (by verdict, kernel and reason)."""
        groups: dict[tuple[str, str, str], list[str]] = {}
        for layer in self.layers:
            groups.setdefault((layer.verdict, layer.kernel, layer.why[:100]), []).append(layer.name)
        rows = [
            {"verdict": verdict, "kernel": kernel, "why": why, "layers": len(names), "first": names[0]}
            for (verdict, kernel, why), names in groups.items()
        ]
        return {
            "layers": rows[:_MOST],
            "repairs": list(self.repairs),
            "changes": self.changes,
            "restored": self.restored,
        }


def rehearse(loader: Rehearsed) -> Rehearsal:
    """Try the route of an update on a paused engine, as the docstring of this module says, and return the result.

    Args:
        loader: of a model that holds the weights that it was started with.
    """
    cold = _Snapshot(loader.model.readings(), contents=True)
    start = _Start(loader, cold)
    found = _attempt(loader, start, cold)
    if found.refused and loader.takes_slices:
        loader.land_whole()
        found = _attempt(loader, start, cold)
    return found


def _attempt(loader: Rehearsed, start: _Start, cold: _Snapshot) -> Rehearsal:
    wrong, changes = dict[str, str](), IN_PLACE  # layer -> what is wrong with it
    try:
        _load(loader, start.changed())
        wrong |= _unreached(loader, start, cold)
        if not _take_back(loader, start, cold):
            changes = BY_RELOAD
            loader.land_whole()
            _load(loader, start.changed())
            if not _take_back(loader, start, cold):
                wrong[""] = "changes reach it neither in place nor by loading the whole model"
    except Exception as error:  # a loader may raise anything
        log.warning("a rehearsal failed", exc_info=error)
        wrong[""] = f"{type(error).__name__}: {error}"
    try:
        _load(loader, start)
    except Exception as error:
        log.warning("the weights that the engine was started with could not be loaded again", exc_info=error)
        wrong.setdefault("", f"{type(error).__name__}: {error}")
    left = cold.differing(_Snapshot(loader.model.readings()))
    wrong |= {layer: f"{', '.join(sorted(names))} not as after a cold start" for layer, names in left.items()}
    return Rehearsal(
        layers=tuple(_verdicts(loader, start, wrong, changes)),
        repairs=tuple(sorted(set(loader.repaired.values()))),
        changes=changes,
        restored=not left,
    )


def _take_back(loader: Rehearsed, start: _Start, cold: _Snapshot) -> bool:
    """Undo what was changed, as a delta lands; return whether all is as in the cold start."""
    try:
        loader.stage(reverting_changes(lambda: iter(start), start.digests, loader.patchable))
        loader.commit()
    except IntegrityError as error:
        log.warning("changes cannot be written in place: %s", error)
        return False
    left = cold.differing(_Snapshot(loader.model.readings()))
    if left:
        log.warning("changes that are written in place leave something else than a cold start: %s", left)
    return not left


def _load(loader: Rehearsed, pairs: Iterable[tuple[str, Tensor]]) -> None:
    loader.start()
    loader.load(_as_sent(loader, pairs) if loader.takes_slices else pairs)
    loader.finish()


def _as_sent(loader: Rehearsed, pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors as a transport that brings slices would hand them over."""
    slices, targets = loader.slices(), loader.targets()
    for name, tensor in pairs:
        blocks = slices.get(name)
        if blocks is None:
            yield name, tensor
        elif blocks:
            yield name, Sliced.cut(name, tensor, blocks, targets.get(name))


class _Start:
    """The start checkpoint, and what one pass over it showed.

    Attributes:
        digests: position digest of each tensor, 32 hex digits.
        arriving: runtime parameter -> what the checkpoint brings to it.
        layers: layer -> names of the checkpoint tensors that land in it.
        unproven: layers below which not all objects were searched.
    """

    def __init__(self, loader: Rehearsed, cold: _Snapshot) -> None:
        self._loader = loader
        self.arriving: dict[str, _Arriving] = {}
        self.layers: dict[str, list[str]] = {}
        self.unproven = cold.unsearched
        taken = Digests()
        for name, before in self:
            taken.add(name, before)
            after = changed(name, before) if chosen_positions(name, before).numel() else None
            for landing in loader.landings(name):
                self.layers.setdefault(_parent(landing.param), []).append(name)
                if after is not None:
                    what = self.arriving.setdefault(landing.param, _Arriving())
                    what.blocks.append((name, landing))
                    what.exact = what.exact and landing.exact and landing.param in cold.contents
                    if what.exact:
                        what.before += content(_block(before, landing))
                        what.after += content(_block(after, landing))
        self.digests = taken.hex()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._loader.start_weights() or ())

    def changed(self) -> Iterator[tuple[str, Tensor]]:
        """Return a pass over the checkpoint with something changed in each tensor."""
        return ((name, changed(name, tensor)) for name, tensor in self)


@dataclass
class _Arriving:
    """What the checkpoint brings to one runtime parameter: the copies that the loader makes, and their content."""

    blocks: list[tuple[str, Landing]] = field(default_factory=list)
    exact: bool = True
    before: PositionDigest = field(default_factory=PositionDigest)
    after: PositionDigest = field(default_factory=PositionDigest)


def _block(tensor: Tensor, landing: Landing) -> Tensor:
    return landing.source.of(tensor.detach().to(landing.dtype).contiguous())


class _Snapshot:
    """Digests of every tensor that can be reached now; of parameters also of their content, in any order.

    Args:
        readings: of all tensors.
        contents: sum up the content of parameters.
    """

    def __init__(self, readings: Iterable[Reading], *, contents: bool = False) -> None:
        taken, layers, sums = Digests(), dict[str, str](), dict[str, Tensor]()  # computed on each tensor's device
        self.answers: dict[str, Tensor] = {}
        self.unsearched = set[str]()
        for reading in readings:
            if reading.unsearched:
                self.unsearched.add(reading.layer)
                continue
            key, tensor = reading.key, reading.tensor
            layers[key] = reading.layer
            taken.add(key, tensor)
            if contents and not reading.derived:
                sums[key] = _content(tensor)
            if reading.of:
                self.answers[f"{reading.layer}.{reading.of}"] = tensor.float()
        self.readings = {key: (layers[key], digest) for key, digest in taken.hex().items()}
        self.contents = dict(zip(sums, as_digests([*sums.values()]), strict=True))

    def differing(self, other: _Snapshot) -> dict[str, list[str]]:
        """Return the names of what differs in ``other``, or is there on one side only, by layer."""
        found: dict[str, list[str]] = {}
        for key in self.readings.keys() | other.readings.keys():
            if self.readings.get(key) != other.readings.get(key):
                layer = (self.readings.get(key) or other.readings[key])[0]
                found.setdefault(layer, []).append(key.removeprefix(f"{layer}."))
        return found


def _unreached(loader: Rehearsed, start: _Start, cold: _Snapshot) -> dict[str, str]:
    """Return the layers in which something stayed although every tensor of the checkpoint changed, each with why."""
    now = {reading.key: reading for reading in loader.model.readings()}  # held: a kernel may put others in their place
    moved = _Snapshot(now.values(), contents=True)
    start.unproven |= moved.unsearched
    off = cold.differing(moved)
    found: dict[str, str] = {}
    for key, what in start.arriving.items():
        layer, _, own = key.rpartition(".")
        names = list(dict.fromkeys(name for name, _ in what.blocks))
        known = key in cold.readings and key in moved.readings
        if own not in off.get(layer, ()) if known else not off.get(layer):
            found[layer] = f"{names[0]} does not reach it when it is loaded again"
        elif known and what.exact and (padding := _padding(cold.contents[key], now[key], what)) is not None:
            if moved.contents[key] != what.after + padding:
                found[layer] = f"not all of {', '.join(names)} reaches it when it is loaded again"
        elif key in cold.answers and key in moved.answers:
            for name, landing in what.blocks:
                if not _answers_differ(cold.answers[key], moved.answers[key], landing):
                    found[layer] = f"{name} does not reach all of it when it is loaded again"
    near = []
    for key, reading in now.items():
        if reading.unsearched or key in start.arriving or cold.readings.get(key) != moved.readings[key]:
            continue
        if not runtime.is_varied(reading.tensor):
            continue
        near.append(reading)
        vector = reading.derived and reading.tensor.dim() <= 1
        unloaded = not reading.derived and start.arriving  # it is known where the checkpoint's tensors land
        if not (vector or unloaded or runtime.is_table(key)):
            found[reading.layer] = f"{reading.name} is computed with, and no load changes it"
    beside: dict[str, dict[str, Reading]] = {}  # very many of each are not looked at pair by pair
    for reading in near:
        if reading.layer not in found:
            for path in (_parent(reading.layer), reading.layer):
                beside.setdefault(path, {})[reading.key] = reading
    for name, tensor in start if beside else ():
        parents = {_parent(_parent(landing.param)) for landing in loader.landings(name)}
        for reading in {key: own for path in parents for key, own in beside.get(path, {}).items()}.values():
            if _is_copy(reading.tensor, tensor):
                found[reading.layer] = f"{reading.name} is a copy of {name}, and no load changes it"
    return found


def _padding(cold: PositionDigest, reading: Reading, what: _Arriving) -> PositionDigest | None:
    """Return what a parameter held beyond what arrived: nothing, or zeros up to its size; None if it is neither."""
    missing = reading.tensor.numel() - sum(landing.numel for _, landing in what.blocks)
    if missing < 0 or any(landing.dtype != reading.tensor.dtype for _, landing in what.blocks):
        return None
    zeros = content(torch.zeros(missing, dtype=reading.tensor.dtype))
    return next((padding for padding in (PositionDigest(), zeros) if what.before + padding == cold), None)


def _answers_differ(before: Tensor, after: Tensor, landing: Landing) -> bool:
    """Return whether nearly all outputs of a block of a weight's rows changed (a few may be equal by chance)."""
    sizes, strides, offset = landing.target
    first = offset // max(1, strides[0]) if len(sizes) > 1 else 0
    rows = slice(first, first + sizes[0]) if len(sizes) > 1 else slice(None)
    differ = (before[:, rows] != after[:, rows]).any(0)
    return bool(differ.float().mean() > runtime.DIFFERING) if differ.numel() else True


def _is_copy(tensor: Tensor, of: Tensor) -> bool:
    """Return whether the sampled values of ``tensor``, in any order, are values of another one, or its padding."""
    if of.is_complex():
        return False
    sample = runtime.sample(tensor)
    every = of.detach().to(tensor.device, tensor.dtype).float().reshape(-1)
    return bool((torch.isin(sample, every) | (sample == 0)).all())


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _verdicts(loader: Rehearsed, start: _Start, wrong: Mapping[str, str], changes: str) -> Iterator[Layer]:
    for layer in dict.fromkeys((*start.layers, *wrong, *sorted(start.unproven))) or ("",):
        verdict, why = BY_RELOAD, ""
        names = start.layers.get(layer, ())  # where none is known to land, none is written in place
        if layer in wrong:
            verdict, why = REFUSED, wrong[layer]
        elif layer in start.unproven:
            verdict, why = UNPROVEN, f"more than {runtime.OBJECTS:,} objects lie below it, and not all were searched"
        elif layer in loader.repaired:
            verdict, why = REPAIRED, loader.repaired[layer]
        elif changes == IN_PLACE and names and all(map(loader.patchable, names)):
            verdict = IN_PLACE
        yield Layer(name=layer or "the model", kernel=_kernel(loader, layer), verdict=verdict, why=why)


def _kernel(loader: Rehearsed, layer: str) -> str:
    module = loader.model.module.get_submodule(layer)
    method = getattr(module, "quant_method", None)
    experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    return ", ".join(type(part).__name__ for part in (module, method, experts) if part is not None)


_AT_ONCE = 1 << 22  # elements

_PERIOD, _EVERY, _SMALL = 257, 32, 1 << 14


def chosen_positions(name: str, tensor: Tensor) -> Tensor:
    """Return which elements of a checkpoint tensor a rehearsal changes: int64, shape (k,), increasing.

    All of a small one; of a large one about one in 32, with a prime period that no layout of a kernel shares, so that a
    delta's staging stays small. None of small integer tensors, bool and g_idx: they hold indices or sizes, which a
    loader may use.
    """
    count = tensor.numel()
    values = tensor.is_floating_point() or tensor.is_complex()
    if not values and (count < _EVERY or tensor.dtype is torch.bool or name.endswith("g_idx")):
        return torch.empty(0, dtype=torch.int64)
    if count <= _SMALL:
        return torch.arange(count)
    pattern = torch.arange(0, _PERIOD, _EVERY)
    whole = torch.arange(0, count, _PERIOD).unsqueeze(1) + pattern
    return whole.reshape(-1)[: int((whole.reshape(-1) < count).sum())]


def changed(name: str, tensor: Tensor) -> Tensor:
    """Return a copy of a checkpoint tensor that is changed at its `chosen_positions`.

    Floats come nearer to zero by a factor that differs between neighbours (no value overflows, no scale turns
    negative), zeros become small; integers lose or gain their lowest bit.
    """
    where = chosen_positions(name, tensor)
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    if tensor.is_floating_point() or tensor.is_complex():
        factor = 0.5 + 0.25 * ((where * 7919) % _PERIOD) / _PERIOD
        old = flat[where].to(torch.complex128 if tensor.is_complex() else torch.float64)
        flat[where] = torch.where(old == 0, 0.01 * factor, old * factor).to(tensor.dtype)
    elif where.numel():  # bool has no last bit
        flat[where] = flat[where] ^ 1
    return flat.reshape(tensor.shape)


def reverting_changes(
    start: Callable[[], Iterable[tuple[str, Tensor]]], digests: Mapping[str, str], sparse: Callable[[str], bool]
) -> Changes:
    """Return the changes that lead from the changed checkpoint back to the start checkpoint.

    Args:
        start: makes a pass over the start checkpoint.
        digests: digest of each of its tensors, 32 hex digits.
        sparse: whether changes of a tensor are written element by element. Of other tensors, and of complex ones, which
            a delta brings whole, the changes only say that something changed.
    """

    def patches(wanted: Callable[[str], bool]) -> Iterator[StreamPatch]:
        for name, tensor in start():
            meta = ParamMeta.of(name, tensor)
            where = chosen_positions(name, tensor).numpy()
            where = where if sparse(name) and not meta.dtype.is_complex else where[:1]
            if where.size and wanted(name):
                yield StreamPatch.of(ParamTable.of((meta,)), name, where, units(tensor)[where])

    def whole(names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        wanted = frozenset(names)
        return ((name, tensor) for name, tensor in start() if name in wanted)

    return Changes(patches=patches, digests=digests, whole=whole)


def content(tensor: Tensor) -> PositionDigest:
    """Return the sums of the elements' bits and of their squares, modulo 2^64, which do not depend on their order."""
    return next(as_digests([_content(tensor)]))


def _content(tensor: Tensor) -> Tensor:
    """Return the same as int64, shape (1, 2), on the tensor's device."""
    found = torch.zeros(1, 2, dtype=torch.int64, device=tensor.device)
    for part in flat_bits(tensor).split(_AT_ONCE):
        wide = part.to(torch.int64)
        found += torch.stack([wide.sum(), (wide * wide).sum()])
    return found
