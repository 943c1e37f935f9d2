"""Load weights into one worker's model of vLLM or SGLang, and refuse weights that do not fit it.

Whole versions go through the model's own loader. Changes are written element by element if the live bytes equal the
checkpoint's. The elements of parameters that an engine keeps in another form (packed, shuffled, quantised) cannot be
written: the transport keeps their checkpoint tensors on the host, and the loader patches them there and loads them
again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from threading import Event
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor, distributed, nn

from torchrl_ext.base.devices import current_device
from torchrl_ext.base.errors import ConfigError, EngineRefusedError, IntegrityError, ManifestError, StaleBaseError
from torchrl_ext.base.types import Info, ParamMeta, cast_hint, dtype_name
from torchrl_ext.data.landing.loader import Rehearsable
from torchrl_ext.data.landing.patcher import Changes, Patcher, Piece, compare, holds, read
from torchrl_ext.data.landing.placement import Landing, Placement, keeps_values, record
from torchrl_ext.data.landing.sliced import Sliced
from torchrl_ext.data.weights.blocks import Block
from torchrl_ext.data.weights.checkpoint import CheckpointSource
from torchrl_ext.data.weights.digests import Digests, PositionDigest, digests_of, position_digest
from torchrl_ext.data.weights.shared import UNCHANGED, refuse_digests, shared
from torchrl_ext.engines.plugin import combine
from torchrl_ext.engines.rehearsal import Rehearsal, Rehearsed, rehearse
from torchrl_ext.engines.runtime import Reading
from torchrl_ext.engines.slices import Slices, layer_of, sharing_no_layer, write_pieces

__all__ = ["UNCHANGED", "EngineLoader", "EngineModel", "StandIns", "rebalanced", "swapped"]

_EVERY = "every parameter of the checkpoint that the engine was started with"


class StandIns(NamedTuple):
    """Tensors without data that replace a model's own.

    Attributes:
        tensors: the stand-ins, in the form that the model's loader writes to, by runtime name.
        needed: number of elements that an update must write to each runtime parameter.
        copied: addresses of live tensors of which a layer uses a packed copy, which a write would not reach.
    """

    tensors: Mapping[str, Tensor]
    needed: Mapping[str, int]
    copied: Collection[int] = ()


class EngineModel(Protocol):
    """One worker's model as its engine processes it.

    Attributes:
        module: the model; its ``load_weights`` takes (name, tensor) pairs of a checkpoint.
        checkpoint: directory or name of the checkpoint that the engine was started with.
        group: the tensor-parallel workers, on the CPU.
        alone: whether no other worker holds a part of the model.
        shared: whether workers hold different tensors, so that a tensor of the checkpoint may belong to another worker.
        dtype: the dtype in which the engine computes.
        tied: whether the output embedding is the input embedding.
        asleep: whether the engine has released the memory of the weights; on an accelerator, whoever reads it then ends
            the process.
        rejection: error of an engine whose settings exclude updates; None if it accepts them.
        dummy: fills a tensor, with the shape and attributes of a runtime parameter, with the numbers that the engine
            generated instead of loading a checkpoint; None if it loaded one.
        by_layer: whether `open` rebuilds single layers, so that each must be loaded as a whole.
        kept: last parts of the names of runtime tensors that keep their memory and bytes while their layer is rebuilt.
        repairs: steps that the engine's own processing leaves out after a load, by name: each takes the module and the
            layers that were loaded, and returns the layers that it finished.
    """

    module: Any
    checkpoint: str
    group: distributed.ProcessGroup
    alone: bool
    shared: bool
    dtype: torch.dtype
    tied: bool
    asleep: bool
    rejection: ConfigError | None
    dummy: Callable[[Tensor], Any] | None
    by_layer: bool

    @property
    def kept(self) -> Collection[str]: ...

    @property
    def repairs(self) -> Mapping[str, Callable[[nn.Module, Collection[nn.Module]], Iterable[nn.Module]]]: ...

    def stand_ins(self) -> AbstractContextManager[StandIns | None]:
        """Swap the model's tensors for stand-ins, and back; None if its loader writes to unknown tensors."""

    def open(self, layers: Collection[str] | None) -> Collection[nn.Module]:
        """Bring layers into the form that the model's loader writes to, and return those that `close` has to finish.

        Args:
            layers: paths of the modules that will be loaded; None for all of them.
        """

    def close(self, layers: Collection[nn.Module]) -> None:
        """Convert layers to the form that the model computes with."""

    def readings(self) -> Iterator[Reading]:
        """Yield every tensor that this worker computes with (`torchrl_ext.engines.runtime.reachable`)."""


@contextmanager
def swapped(
    model: nn.Module, stand_ins: Callable[[nn.Module], tuple[dict[str, Any], dict[str, Any]]]
) -> Iterator[dict[str, Tensor]]:
    """Swap every parameter and buffer for a stand-in, and back; yields the stand-ins by name.

    It also removes what a loader derives from them meanwhile: all parameters, buffers, modules and other attributes are
    restored.

    Args:
        model: the model whose modules are changed.
        stand_ins: makes the parameters and the buffers of one module.
    """
    before: list[tuple[Any, Any]] = []
    for module in model.modules():
        registered = module._parameters, module._buffers, module._non_persistent_buffers_set, module._modules
        before += [(state, state.copy()) for state in (*registered, vars(module))]
    try:
        for module in model.modules():
            parameters, buffers = stand_ins(module)
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)
        yield {**dict(model.named_parameters()), **dict(model.named_buffers())}
    finally:
        for state, content in before:
            state.clear()
            state.update(content)


@final
class EngineLoader(Rehearsed, Rehearsable):
    """Loads weights into one worker's model, and knows which tensors the model holds unchanged.

    `digests` reads a tensor back from the live model if this worker holds all of it, unchanged. For other tensors it
    returns the digest of the tensor that the model's loader received: a packed or quantised form cannot be read in
    checkpoint coordinates, so the rehearsal must show that it is right. Before any were received, they are those of the
    start checkpoint, while no other weights were loaded. Tensors that land in one memory have to have one digest.

    Args:
        model: the worker's model.

    Attributes:
        modified: whether weights were loaded since the engine's start.
        repaired: path of each layer that the last load had to repair -> the repair.
        takes_slices: whether the transport sends slices of tensors (`torchrl_ext.data.landing.sliced`).
    """

    model: EngineModel

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self.modified = self.takes_slices = False
        self.repaired = dict[str, str]()
        self._needs_digests = True
        self._rehearsals: dict[bool, Rehearsal] = {}  # by whether slices came
        self._rehearsing = False
        self._shapes = _shapes_of(model.checkpoint)
        self._params: tuple[ParamMeta, ...] = ()
        self._placement: Placement | None = None
        self._stand_ins = StandIns({}, {})
        self._pieces: dict[str, list[Piece]] = {}
        self._addresses: dict[str, int] = {}  # of the memory in which they lie, by runtime name
        self._compared = False  # whether they are known
        self._slices: Slices | None = None  # of this placement and these pieces, once they were asked for
        self._patcher = Patcher({})
        self._agreed: dict[str, tuple[Landing, ...]] = {}  # read at the start, and found to be the checkpoint's bytes
        self._handed: dict[str, str] = {}  # what the model's loader got, with a digest where that was needed at once
        self._taken = Digests()  # of the others that cannot be read back, if somebody will ask
        self._staged: Mapping[str, PositionDigest] = {}
        self._expected: Mapping[str, str] = {}
        self._whole: list[tuple[str, Tensor]] = []
        self._opened: Collection[nn.Module] | None = None  # None: no layer had to be opened
        self._part: frozenset[str] | None = None
        self._direct: frozenset[str] = frozenset()  # of the part, what is written past the model's loader
        self._targets: Mapping[str, Sliced] = {}
        self._loading = self._whole_model = False

    # what can land, and where

    @property
    def idle(self) -> bool:
        return not self._loading

    def check(self, params: Iterable[ParamMeta]) -> None:
        """Run the model's loader on tensors without data, and refuse parameters that do not fit; read no weight."""
        params = tuple(params)
        if self.model.rejection is not None:
            raise self.model.rejection
        if self._params == params:
            self._follow()
            return
        for meta in params:  # loaders of sharded layers narrow before they compare, and would let a larger one pass
            expected = self._shapes.get(meta.name, meta.shape)
            if expected != meta.shape:
                raise ManifestError(
                    f"parameter {meta.name!r} arrives with shape {list(meta.shape)}",
                    expected=f"{list(expected)}, as in the checkpoint that the engine was started with",
                    state=UNCHANGED,
                )
        self._placement, self._params = self._placed(params), params
        self.shared = () if self._placement is None else shared(self._places(self._placement))
        self._forget_places()

    @property
    def device(self) -> torch.device:
        own = (parameter.device for parameter in self.model.module.parameters() if not parameter.is_meta)
        return next(own, current_device())

    def compare_start(self, stop: Event | None = None) -> None:
        """Find what can be written in place in the tensors that the model computes with, unless that is known.

        The slices that a trainer was asked for stay as they are. A model that sleeps is left for a later call.
        """
        if self._compared or self.model.asleep:
            return
        stop = stop or Event()
        if self._placement is not None and not self._whole_model:
            self._pieces = self._in_place(self._placement, stop)
        if stop.is_set():
            self._pieces = {}
            return
        self._patcher = Patcher(self._pieces)
        self._addresses = self._where({landing.param for name in self._pieces for landing in self.landings(name)})
        self._compared = True

    def _forget_places(self) -> None:
        self._pieces, self._slices, self._addresses, self._patcher = {}, None, {}, Patcher({})
        self._compared = False

    def _refuse_asleep(self) -> None:
        if self.model.asleep:
            raise EngineRefusedError(
                "the engine's weights are asleep",
                expected="an engine that is awake",
                state=UNCHANGED,
                hint="call wake_up first",
            )

    def _where(self, params: Collection[str]) -> dict[str, int]:
        live = self._live() if params else {}
        return {param: live[param].data_ptr() for param in params if param in live}

    def _follow(self) -> bool:
        """Return whether the engine has put tensors into other memory; then nothing is known of what lies there."""
        if self._where(self._addresses) == self._addresses:
            return False
        self._forget_places()
        return True

    def _refuse_moved(self) -> None:
        if self._follow():
            raise StaleBaseError(
                "the engine has replaced the memory of parameters since the last update",
                expected="the tensors on which the changes build",
                state=UNCHANGED,
                hint="send again: the next update is sent whole",
            )

    def landings(self, name: str) -> tuple[Landing, ...]:
        return self._placement.landings.get(name, ()) if self._placement is not None else ()

    def patchable(self, name: str) -> bool:
        return name in self._patcher.pieces

    def land_whole(self) -> None:
        self._whole_model = True
        self._forget_places()
        self.compare_start()

    def start_weights(self) -> Iterable[tuple[str, Tensor]] | None:
        """Return a new pass over the engine's start weights, under an update's names; None if unknown.

        If the engine generated its weights, the parts of other workers are zero here.
        """
        if self.model.dummy is None:
            return self._start_tensors() if self._shapes else None
        if self._placement is None or not all(map(_is_exact, self._placement.landings.values())):
            return None  # what a loader computes from checkpoint tensors cannot be undone
        return self._dummy_checkpoint(self._placement, self.model.dummy)

    def _start_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the start checkpoint's tensors that an update has, too; in its dtypes if that loses nothing."""
        dtypes = {meta.name: meta.dtype for meta in self._params}
        for name, tensor in CheckpointSource(self.model.checkpoint):
            if name in dtypes:
                exact = dtypes[name] == self.model.dtype or keeps_values(tensor.dtype, dtypes[name])
                yield name, tensor.to(dtypes[name]) if exact else tensor

    def _dummy_checkpoint(self, placement: Placement, dummy: Callable[[Tensor], Any]) -> Iterator[tuple[str, Tensor]]:
        device = next(self.model.module.parameters()).device  # random numbers differ between devices
        for meta in placement.params:
            landings = placement.landings[meta.name]
            tensor = torch.zeros(meta.shape, dtype=landings[0].dtype if landings else meta.dtype)
            for landing in landings:
                form = self._stand_ins.tensors[landing.param]
                filled = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device=device).zero_()
                vars(filled).update(vars(form))
                dummy(filled)
                landing.source.of(tensor).copy_(landing.target.of(filled))
            yield meta.name, tensor

    def _placed(self, params: tuple[ParamMeta, ...]) -> Placement | None:
        """Run the model's loader over stand-ins, and return what lands where; None where that is not known."""
        with self.model.stand_ins() as stand_ins:
            if stand_ins is None:
                self._refuse_absent(self._shapes, {meta.name for meta in params})
                return None
            placement = record(self.model.module.load_weights, params, stand_ins.tensors)
        self._refuse(placement, stand_ins.needed)
        self._stand_ins = stand_ins
        return placement

    def _places(self, placement: Placement) -> Iterator[tuple[Any, str]]:
        """Yield where tensors land as they are, each with its name; a tied head also lands where its embedding does.

        Engines differ in what they do with a tied head that comes: they pass over it, or write it over the embedding.
        """
        live = dict(self._named())
        embedding = self._embedding(placement)
        for meta in placement.params:
            landings = placement.landings[meta.name]
            if embedding and self._is_tied_head(meta.name):
                landings = (*landings, *placement.landings[embedding])
            for landing in landings:
                if landing.exact and landing.numel:
                    tensor, form = live.get(landing.param), self._stand_ins.tensors[landing.param]
                    memory, offset = id(tensor) if tensor is not None else landing.param, 0
                    if tensor is not None and (tensor.shape, tensor.stride()) == (form.shape, form.stride()):
                        memory, offset = tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())
                    target = landing.target._replace(offset=landing.target.offset + offset)
                    yield (memory, landing.dtype, target, landing.source), meta.name

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.module.named_parameters(remove_duplicate=False)
        yield from self.model.module.named_buffers(remove_duplicate=False)

    def _embedding(self, placement: Placement) -> str:
        """Return the name of the tensor that lands in the memory of a tied head; "" if none does on this worker."""
        heads = {id(tensor) for name, tensor in self._named() if self._is_tied_head(name)}
        params = {name for name, tensor in self._named() if id(tensor) in heads}
        landed = {name: own for name, own in placement.landings.items() if own and not self._is_tied_head(name)}
        found = (name for name, landings in landed.items() if any(landing.param in params for landing in landings))
        return next(found, None) or next((name for name in landed if name.endswith("embed_tokens.weight")), "")

    def _refuse(self, placement: Placement, needed: Mapping[str, int]) -> None:
        """Refuse names that land nowhere, parameters that would stay incomplete, and values that would be rounded."""
        for name in placement.nowhere():
            elsewhere = self.model.shared and (name in self._shapes or not self._shapes)
            tied = self._is_tied_head(name) and (self.model.shared or self._embedding(placement))
            if not (elsewhere or tied or name.endswith("rotary_emb.inv_freq")):
                raise _unknown(name)
        for param, numel in needed.items():
            written = placement.written[param]
            if written < numel and (written or not self._is_tied_head(param)):  # a tied head has no memory of its own
                block = layer_of(layer_of(param))
                near = [name for name in self._shapes if name.startswith(block)]
                self._refuse_absent(near, {meta.name for meta in placement.params})
                raise ManifestError(
                    f"the update leaves parameter {param!r} of the engine's model incomplete: {written} of {numel} "
                    f"elements, from {', '.join(placement.sources(param)) or 'no parameter of the update'}",
                    expected=_EVERY,
                    state=UNCHANGED,
                )
        for meta, landing in placement.lossy():
            raise ManifestError(
                f"parameter {meta.name!r} arrives as {dtype_name(meta.dtype)}, and the engine would round it",
                expected=f"{dtype_name(landing.dtype)}, in which the engine computes",
                state=UNCHANGED,
                hint=cast_hint((name, one.dtype) for name, own in placement.landings.items() for one in own[:1]),
            )

    def _refuse_absent(self, names: Iterable[str], sent: Collection[str]) -> None:
        for name in names:
            if name not in sent and not self._is_tied_head(name):
                raise ManifestError(
                    f"parameter {name!r} is missing from the update",
                    expected=_EVERY,
                    state=UNCHANGED,
                    hint="register the whole model, or name a part with only=",
                )

    def _is_tied_head(self, name: str) -> bool:
        """Return whether ``name`` is the output embedding of a model in which that is the input embedding."""
        return self.model.tied and name.endswith("lm_head.weight")

    def _live(self) -> dict[str, Tensor]:
        return {**dict(self.model.module.named_parameters()), **dict(self.model.module.named_buffers())}

    def _in_place(self, placement: Placement, stop: Event) -> dict[str, list[Piece]]:
        """Return the copies of each tensor whose bytes show that the live model holds it as it was loaded.

        A parameter of the same shape may be shuffled, so shapes prove nothing. The bytes are compared with those of the
        start checkpoint, while the model still holds it; what was found then holds for later lists of parameters. What
        shares a layer with a tensor that is kept in another form is loaded with that, as the layer is built anew.
        """
        live, found = self._live(), {}
        for meta in placement.params:
            landings = placement.landings[meta.name]
            plain = all(landing.dtype == meta.dtype and self._is_plain(live, landing.param) for landing in landings)
            absorbed = any("kv_b_proj" in landing.param for landing in landings)  # MLA computes with a product of it
            if landings and plain and _is_exact(landings) and not absorbed and not meta.dtype.is_complex:
                found[meta.name] = [landing.piece(live[landing.param]) for landing in landings]
        for name, tensor in () if self.modified else self.start_weights() or ():
            if stop.is_set():
                break
            if name in found and holds(found[name], tensor):
                self._agreed[name] = placement.landings[name]
        agreed = {name for name in found if self._agreed.get(name) == placement.landings[name]}
        alone = sharing_no_layer(agreed, placement.landings, self._stays)
        kept = {name: pieces for name, pieces in found.items() if name in alone}
        nowhere = placement.nowhere()
        embedding = kept.get(self._embedding(placement), []) if nowhere else []
        return kept | {name: embedding if self._is_tied_head(name) else [] for name in nowhere}

    def _is_plain(self, live: Mapping[str, Tensor], param: str) -> bool:
        """Return whether the engine keeps a tensor in its loaded form, and no packed copy beside it."""
        tensor, form = live.get(param), self._stand_ins.tensors[param]
        if tensor is None or tensor.data_ptr() in self._stand_ins.copied:
            return False
        return (tensor.shape, tensor.stride(), tensor.dtype) == (form.shape, form.stride(), form.dtype)

    def _stays(self, param: str) -> bool:
        return not self.model.by_layer or param.rpartition(".")[2] in self.model.kept

    def _layers(self, names: Iterable[str]) -> set[str]:
        return {layer_of(landing.param) for name in names for landing in self.landings(name)}

    def _load_together(self, names: Collection[str]) -> list[str]:
        """Return the tensors to load when some that cannot be patched change: what is built anew is loaded whole."""
        together = [meta.name for meta in self._params if names and not self.patchable(meta.name)]
        if self._whole_model or not self.model.by_layer:
            return together
        layers = self._layers(names)
        return [name for name in together if self._layers([name]) & layers]

    # which parts of tensors are needed

    def by_slices(self, wanted: bool) -> None:
        self.takes_slices = wanted

    def slices(self) -> Mapping[str, tuple[Block, ...]]:
        sliced = self._sliced()
        return {} if sliced is None else sliced.blocks

    def whole(self) -> Mapping[str, str]:
        sliced = self._sliced()
        if sliced is not None:
            return sliced.whole
        why = (
            "layers of this model rebuild their weights after loading, so the plugin cannot know which parts they need"
        )
        return dict.fromkeys((meta.name for meta in self._params), why)

    def targets(self) -> Mapping[str, Sliced]:
        return self._targets

    def _sliced(self) -> Slices | None:
        if self._slices is None and self._placement is not None:
            self._slices = Slices(self._placement, self._pieces)
        return self._slices

    def _coming(self) -> Slices | None:
        """Return the slices that the transport brings; None where it brings whole tensors."""
        return self._sliced() if self.takes_slices else None

    # whole versions, and parts of them

    def part(self, names: frozenset[str] | None) -> None:
        """Announce the update's tensors; opened layers must be complete, because the engine rebuilds them."""
        self._part, self._direct = None, frozenset()
        self._handed, self._taken = {}, Digests()  # of the update before, which may have brought a part
        if names is None:
            return
        for name in names - {meta.name for meta in self._params}:
            raise _unknown(name)
        sliced = self._coming()
        direct = names & self._patcher.pieces.keys() if sliced is None else names - {*sliced.loaded}
        opening = sorted(names - direct)
        tied = (name for own in self.shared for name in own if not names.isdisjoint(own))
        lacking = sorted({*self._load_together(opening), *tied} - names)
        if lacking:
            more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
            raise ManifestError(
                f"of a part with {', '.join(map(repr, (opening or sorted(names))[:3]))} the engine rebuilds layers or "
                f"shares memory, and lacks {', '.join(map(repr, lacking[:3]))}{more} for them",
                state=UNCHANGED,
                hint="name them too, or leave only= out",
            )
        self._part, self._direct = names, direct

    def ready(self) -> None:
        self._refuse_asleep()
        if self._part is not None:
            self._refuse_moved()

    def start(self) -> None:
        self.ready()
        self._follow()
        self.compare_start()
        self.forget()
        self.modified = self.modified or not self._rehearsing
        sliced = self._coming()
        if self._part is None:
            self._opened = self._open(None if sliced is None or not sliced.direct else sliced.loaded)
        else:
            rest = self._part - self._direct
            self._opened = self._open(rest) if rest else None
        self._targets = {} if sliced is None else sliced.targets(self._live())
        self._loading = True

    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Apply every pair with the model's own loader; some slices bypass it (`Slices.direct`)."""
        with torch.no_grad():
            self.model.module.load_weights(self._passing(pairs))

    def _passing(self, pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield what the model's loader takes; slices have no digests, as the transport has checked each block."""
        sliced = self._coming()
        direct = self._direct if sliced is None else sliced.direct
        tied = set() if self._rehearsing else {name for own in self.shared for name in own}
        for name, tensor in pairs:
            digest = position_digest(tensor).hex() if name in tied and not self.takes_slices else ""
            if name in tied:
                refuse_digests(self.shared, {**self._handed, name: digest})
            elif self._needs_digests and not self.takes_slices and not self._readable(name):
                self._taken.add(name, tensor)
            self._handed[name] = digest
            if name not in direct:
                yield name, tensor
            elif tensor is not self._targets.get(name):
                write_pieces(tensor, self._pieces.get(name, ()))
        self._taken.launch()

    def finish(self) -> None:
        """End the load: convert the layers to the form that the model computes with.

        Raises:
            IntegrityError: parameters that were announced did not arrive.
        """
        if not self._loading:
            return
        names = self.missing()
        if names:
            raise IntegrityError(
                f"{len(names)} of the parameters that were announced did not arrive, first {names[0]!r}",
                state="the model holds part of an update",
                hint="send the version again",
            )
        if self._opened is not None:
            self._close(self._opened)
        self._loading, self._targets, self._opened = False, {}, None

    def missing(self) -> list[str]:
        """Return the parameters of an unfinished load that have not arrived yet."""
        if not self._loading or self._rehearsing:
            return []
        sliced = self._coming()
        expected = (meta.name for meta in self._params if self._part is None or meta.name in self._part)
        due = (name for name in expected if sliced is None or sliced.landing(name))
        return [name for name in due if name not in self._handed]

    def _open(self, names: Collection[str] | None) -> Collection[nn.Module]:
        self.repaired = {}
        return self.model.open(None if names is None else self._layers(names))

    def _close(self, layers: Collection[nn.Module]) -> None:
        self.model.close(layers)
        self._repair(layers)

    def _repair(self, layers: Collection[nn.Module]) -> None:
        paths = {id(module): path for path, module in self.model.module.named_modules()}
        for step, repair in self.model.repairs.items():
            self.repaired |= {paths[id(layer)]: step for layer in repair(self.model.module, layers)}

    def reloaded(self) -> None:
        self._loading = False
        self._repair(list(self.model.module.modules()))
        self._follow()

    def vouch(self, wanted: bool) -> None:
        self._needs_digests = wanted

    def digests(self) -> dict[str, str]:
        self._refuse_asleep()
        self._follow()
        self.compare_start()
        whole = self.model.alone and self._params and all(self.patchable(meta.name) for meta in self._params)
        if not self._handed and not whole:
            start = None if self.modified else self.start_weights()
            if start is None:
                raise ConfigError(
                    "this engine cannot read its weights back, and no longer holds the weights that it was started "
                    "with",
                    hint="leave base= out, so that the trainer first sends a full version",
                )
            return {name: one.hex() for name, one in digests_of(start).items()}
        names, shares = self._handed or self._pieces, self._patcher.shares
        here = [meta for meta in self._params if meta.name in names and self._readable(meta.name)]
        once = {meta.name for meta in here if shares[meta.name].units == meta.numel}
        held = self._patcher.digests_of_memory(once)
        held |= digests_of((meta.name, read(meta, self._pieces[meta.name])) for meta in here if meta.name not in once)
        return {**self._handed, **self._taken.hex(), **{name: one.hex() for name, one in held.items()}}

    def _readable(self, name: str) -> bool:
        """Return whether this worker holds the tensor whole, as it came."""
        return self.model.alone and bool(self._pieces.get(name))

    def forget(self) -> None:
        """Forget the model's bytes and the staged changes."""
        self._handed, self._taken, self._whole = {}, Digests(), []
        self._patcher.forget()

    def invalidate(self) -> None:
        self.forget()
        self.modified = True

    # changes

    def stage(self, changes: Changes) -> None:
        """Translate changes of tensors that can be patched; update the others on the host."""
        self._whole = []
        self._refuse_asleep()
        self._refuse_moved()
        if not self._rehearsing:
            refuse_digests(self.shared, changes.digests)
        self._staged, self._expected = self._patcher.stage(changes), changes.digests
        names = self._load_together(self._patcher.others)
        self._whole = list(changes.whole(names)) if names else []
        compare(digests_of(self._whole), self._expected)

    def confirm(self) -> None:
        """Compare the staged changes of all workers of the engine with the trainer's digests."""
        compare(self._together(self._staged), self._expected)

    @torch.no_grad()
    def commit(self) -> None:
        self._refuse_asleep()
        self._refuse_moved()
        self._handed, self._taken, self.modified = {}, Digests(), self.modified or not self._rehearsing
        self._patcher.commit()
        whole, self._whole = self._whole, []
        if whole:
            self._patcher.drop()  # there is no way back from what the model's loader writes
            layers = self._open(None if self._whole_model else [name for name, _ in whole])
            self.model.module.load_weights(iter(whole))
            self._close(layers)

    def obstacle(self) -> str:
        return "layers that the engine keeps in another form change" if self._whole else ""

    @torch.no_grad()
    def undo(self) -> None:
        self._refuse_asleep()
        self._refuse_moved()
        self._patcher.undo()

    def keep(self) -> None:
        self._patcher.keep()

    def _together(self, own: Mapping[str, PositionDigest]) -> dict[str, PositionDigest]:
        return combine(own, self._patcher.shares, self._params, self.model.group)

    # what is proved

    @property
    def _rehearsed(self) -> Rehearsal | None:
        """The rehearsal of the current route, or the one after which the engine could not be restored."""
        lost = next((found for found in self._rehearsals.values() if not found.restored), None)
        return lost or self._rehearsals.get(self.takes_slices)

    def proof(self) -> str:
        """Return ``"in place"`` or ``"rehearsed"`` if a rehearsal showed that of every layer, else ``"sent"``."""
        return "sent" if self._rehearsed is None else self._rehearsed.proof

    def unrehearsed(self) -> bool:
        return self._rehearsed is None and not self._why_not()

    def _why_not(self) -> str:
        """Return why no rehearsal is possible; "" if one is."""
        if self.modified:
            return "the engine no longer holds the weights that it was started with; start it again"
        return "the engine was started without a checkpoint" if self.start_weights() is None else ""

    def rehearsal(self) -> Info:
        return {"why": self._why_not()} if self._rehearsed is None else self._rehearsed.to_json()

    @torch.no_grad()
    def rehearse(self) -> Info:
        """Rehearse the route of an update on the idle model, which holds its start weights; return the result.

        Raises:
            EngineRefusedError, IntegrityError: see `Rehearsal.refusal`.
        """
        self._refuse_asleep()
        if not self._params and self._shapes:  # no trainer has named its own yet
            self.check(CheckpointSource(self.model.checkpoint).params())
        if self._why_not():
            return self.rehearsal()
        self.compare_start()
        self._rehearsing = True
        try:
            found = self._rehearsals[self.takes_slices] = rehearse(self)
        finally:
            self._rehearsing = False
        self.modified = not found.restored
        self.refuse_unsound()
        return found.to_json()

    def refuse_unsound(self, *, unproved: bool = False) -> None:
        """Raise `Rehearsal.refusal`; with ``unproved`` only if the engine was not restored."""
        found = self._rehearsed
        if found is not None and found.refused and not (unproved and found.restored):
            raise found.refusal()


def rebalanced() -> ConfigError:
    """Return the refusal of an engine that moves experts between its workers (EPLB)."""
    return ConfigError(
        "this engine moves experts between its workers while it serves (EPLB)",
        expected="an engine started without --enable-eplb",
        state=UNCHANGED,
        hint="the location of an expert's weights changes from step to step, so no update could be proved",
    )


def _unknown(name: str) -> ManifestError:
    return ManifestError(
        f"the engine's model has no parameter {name!r}",
        expected="the names of the checkpoint that the engine was started with",
        state=UNCHANGED,
        hint="map the trainer's names with WeightSender(..., mapper=...)",
    )


def _is_exact(landings: Iterable[Landing]) -> bool:
    return all(landing.exact for landing in landings)


def _shapes_of(checkpoint: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint on this machine by name; nothing for any other."""
    try:
        return {meta.name: meta.shape for meta in CheckpointSource(checkpoint).params()}
    except (ConfigError, IntegrityError):
        return {}
