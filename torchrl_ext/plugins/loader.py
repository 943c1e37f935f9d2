"""How weights land in one worker's model: what vLLM and SGLang share, and how they refuse what cannot land.

Whole versions go through the model's own loader. Changes are written element by element where the live bytes are those
of the checkpoint. Parameters that an engine keeps in another form (packed, shuffled, quantised) cannot be written to:
their checkpoint tensors are kept on the host by the transport, patched there, and loaded again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn

from torchrl_ext.errors import ConfigError, IntegrityError
from torchrl_ext.landing.loader import Changes
from torchrl_ext.landing.patcher import Patcher, Piece, compare, holds, read
from torchrl_ext.landing.placement import Landing, Placement
from torchrl_ext.landing.sliced import Sliced
from torchrl_ext.plugins import refusals
from torchrl_ext.plugins.slices import Slices, apart, land
from torchrl_ext.plugins.workers import combine
from torchrl_ext.proof.engine_loader import EngineLoader
from torchrl_ext.proof.known_weights import start_tensors
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.checkpoint import CheckpointSource
from torchrl_ext.weights.digests import PositionDigest, position_digest, tensor_digest
from torchrl_ext.weights.shards.blocks import Block

__all__ = ["PluginLoader"]


class PluginLoader(EngineLoader):
    """Loads weights into one worker's model, and knows which tensors lie there with the bytes that came.

    `digests` reads a tensor back from the live model where this worker alone holds it whole and as it came. For others
    it gives the digest of what was handed to the model's loader: a packed or quantised form cannot be read in
    checkpoint coordinates, so the rehearsal has to show what becomes of them (`EngineLoader`).

    Args:
        model: the worker's model.
        checkpoint: the directory, or the name, of what the engine was started with.
        group: the tensor-parallel workers, on the CPU.
        alone: no other worker holds a part of the model.
        dtype: in which the engine computes.
        tied: the output embedding is the input embedding.
        dummy: the model was filled with random numbers instead of the checkpoint.
        unfit: why an engine of these settings takes no update; None where it does.
    """

    def __init__(
        self,
        model: nn.Module,
        checkpoint: str,
        group: distributed.ProcessGroup,
        *,
        alone: bool,
        dtype: torch.dtype,
        tied: bool,
        dummy: bool = False,
        unfit: ConfigError | None = None,
    ) -> None:
        super().__init__()
        self._model: Any = model  # every model of an engine has `load_weights`
        self._checkpoint, self._group, self._alone = checkpoint, group, alone
        self._dtype, self._tied, self._dummy, self._unfit = dtype, tied, dummy, unfit
        self._shapes = _shapes_of(checkpoint)
        self._params: tuple[ParamMeta, ...] = ()
        self._placement: Placement | None = None
        self._pieces: dict[str, list[Piece]] = {}
        self._slices: Slices | None = None  # of this placement and these pieces, once they were asked for
        self._patcher = Patcher({})
        self._agreed: dict[str, tuple[Landing, ...]] = {}  # read at the start, and found to be the checkpoint's bytes
        self._handed: dict[str, str] = {}
        self._staged: Mapping[str, PositionDigest] = {}
        self._expected: Mapping[str, str] = {}
        self._whole: list[tuple[str, Tensor]] = []
        self._opened: Collection[nn.Module] | None = None  # None: no layer had to be opened
        self._part: frozenset[str] | None = None
        self._direct: frozenset[str] = frozenset()  # of the part, what is written past the model's loader
        self._targets: Mapping[str, Sliced] = {}
        self._loading = self._whole_model = False

    # what differs between engines

    @abstractmethod
    def _placed(self, params: tuple[ParamMeta, ...]) -> Placement | None:
        """Run the model's loader over tensors without data, and return what lands where; None where that is not known.

        Raises:
            ManifestError, ConfigError: the parameters cannot land, see `check`.
        """

    @abstractmethod
    def _open(self, names: Collection[str] | None) -> Collection[nn.Module]:
        """Bring layers into the form that the model's loader writes to, and return those that `_close` has to finish.

        Args:
            names: tensors that will be loaded; None for all of them.
        """

    @abstractmethod
    def _close(self, layers: Collection[nn.Module]) -> None:
        """Bring layers into the form that is computed with."""

    @abstractmethod
    def _loaded_with(self, touched: set[str]) -> Collection[str]:
        """Return the tensors to load when those of ``touched``, which cannot be patched, change."""

    @abstractmethod
    def _made_up(self) -> Iterable[tuple[str, Tensor]] | None:
        """Return the checkpoint of a model that was filled with random numbers; None where it cannot be known."""

    def _is_plain(self, tensor: Tensor | None, landing: Landing) -> bool:
        """Return whether a runtime tensor can have the form in which it was loaded, as far as the engine tells."""
        return True

    def _stays(self, param: str) -> bool:
        """Return whether a runtime tensor keeps its memory and its bytes while `_open` brings its layer into form."""
        return True

    # what can land, and where

    @property
    def idle(self) -> bool:
        return not self._loading

    def check(self, params: Iterable[ParamMeta]) -> None:
        """Refuse what cannot land, by running the model's loader over tensors without data; live ones are not touched.

        Raises:
            ManifestError: names the first parameter that is unknown, missing, or of another shape or dtype.
            ConfigError: an engine of these settings takes no update.
        """
        params = tuple(params)
        if self._unfit is not None:
            raise self._unfit
        if self._params == params:
            return
        for meta in params:  # loaders of sharded layers narrow before they compare, and would let a larger one pass
            expected = self._shapes.get(meta.name, meta.shape)
            if expected != meta.shape:
                raise refusals.misshapen(meta, expected)
        self._placement = self._placed(params)
        self._params, self._pieces, self._patcher, self._slices = params, {}, Patcher({}), None
        if self._placement is not None and not self._whole_model:
            self._pieces = self._in_place(self._placement)
            self._patcher = Patcher(self._pieces)

    def ready(self) -> None:
        if not self._params and self._shapes:
            self.check(CheckpointSource(self._checkpoint).params())

    def start_weights(self) -> Iterable[tuple[str, Tensor]] | None:
        if self._dummy:
            return self._made_up()
        return start_tensors(CheckpointSource(self._checkpoint), self._params, self._dtype) if self._shapes else None

    def landings(self, name: str) -> Iterable[Landing]:
        return self._placement.landings.get(name, ()) if self._placement is not None else ()

    def patchable(self, name: str) -> bool:
        return name in self._patcher.pieces

    def land_whole(self) -> None:
        self._pieces, self._patcher, self._slices, self._whole_model = {}, Patcher({}), None, True

    def kernel(self, layer: str) -> str:
        module = self._model.get_submodule(layer)
        method = getattr(module, "quant_method", None)
        experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        return ", ".join(type(part).__name__ for part in (module, method, experts) if part is not None)

    def _is_tied_head(self, name: str) -> bool:
        """Return whether ``name`` is the output embedding of a model in which that is the input embedding."""
        return self._tied and name.endswith("lm_head.weight")

    def _live(self) -> dict[str, Tensor]:
        """Return the parameters and buffers that the model computes with, by runtime name."""
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}

    def _in_place(self, placement: Placement) -> dict[str, list[Piece]]:
        """Return the copies of each tensor whose bytes show that the live model holds it as it was loaded.

        A parameter of the same shape may be shuffled, so shapes prove nothing. The bytes are compared with those of the
        start checkpoint, while the model still holds it; what was found then holds for later lists of parameters. What
        shares a layer with a tensor that is kept in another form is loaded with that, as the layer is built anew.
        """
        live, found = self._live(), {}
        for meta in placement.params:
            landings = placement.landings[meta.name]
            exact = all(
                one.exact and one.dtype == meta.dtype and self._is_plain(live.get(one.param), one) for one in landings
            )
            absorbed = any("kv_b_proj" in one.param for one in landings)  # MLA computes with a product of it
            if landings and exact and not absorbed and not meta.dtype.is_complex:
                found[meta.name] = [one.piece(live[one.param]) for one in landings]
        for name, tensor in () if self.touched else self.start_weights() or ():
            if name in found and holds(found[name], tensor):
                self._agreed[name] = placement.landings[name]
        plain = {name for name in found if self._agreed.get(name) == placement.landings[name]}
        plain &= apart(plain, placement.landings, self._stays)
        kept = {name: pieces for name, pieces in found.items() if name in plain}
        embedding = next((pieces for name, pieces in kept.items() if name.endswith("embed_tokens.weight")), [])
        return kept | {name: embedding if self._is_tied_head(name) else [] for name in placement.nowhere()}

    # which parts of tensors are needed

    def slices(self) -> Mapping[str, tuple[Block, ...]]:
        sliced = self._sliced()
        return {} if sliced is None else sliced.blocks

    def whole(self) -> Mapping[str, str]:
        sliced = self._sliced()
        return dict.fromkeys((meta.name for meta in self._params), _UNKNOWN) if sliced is None else sliced.whole

    def targets(self) -> Mapping[str, Tensor]:
        """Return live memory of tensors that land without the model's loader, from a `start` on that takes slices."""
        return self._targets

    def _sliced(self) -> Slices | None:
        if self._slices is None and self._placement is not None:
            self._slices = Slices(self._placement, self._pieces)
        return self._slices

    # how what cannot land is refused

    def _refuse(self, placement: Placement, needed: Mapping[str, int], *, shared: bool) -> None:
        """Refuse names that land nowhere, parameters that would stay incomplete, and values that would be rounded.

        Args:
            placement: where the parameters of the update land.
            needed: how many elements of each runtime parameter an update has to write.
            shared: workers hold different parts of the model, so that names of the checkpoint may land elsewhere.
        """
        for name in placement.nowhere():
            elsewhere = shared and (name in self._shapes or not self._shapes)
            if not (elsewhere or self._is_tied_head(name) or name.endswith("rotary_emb.inv_freq")):
                raise refusals.unknown(name)
        names = {meta.name for meta in placement.params}
        for param, numel in needed.items():
            written = placement.written[param]
            if written < numel and (written or not self._is_tied_head(param)):  # a tied head has no memory of its own
                prefix = param.rpartition(".")[0].rpartition(".")[0]
                self._refuse_absent(name for name in self._shapes if name not in names and name.startswith(prefix))
                raise refusals.incomplete(param, written, numel, placement.sources(param))
        for meta, landing in placement.lossy():
            raise refusals.rounded(meta, landing.dtype)

    def _refuse_absent(self, names: Iterable[str]) -> None:
        for name in names:
            if not self._is_tied_head(name):
                raise refusals.absent(name)

    # whole versions, and parts of them

    def part(self, names: frozenset[str] | None) -> None:
        """Note what comes; the layers that are opened for it have to come whole, as the engine builds them anew.

        Raises:
            ManifestError: a tensor lands together with one that is not among ``names``, or is not known.
        """
        self._part, self._direct = None, frozenset()
        if names is None:
            return
        for name in names - {meta.name for meta in self._params}:
            raise refusals.unknown(name)
        sliced = self._sliced() if self.takes_slices else None
        if sliced is None:
            plain = {name for name in names if self.patchable(name)}
            direct = apart(plain, {name: [*self.landings(name)] for name in names})
        else:
            direct = frozenset(name for name in names if name in sliced.direct or not sliced.landing(name))
        left = sorted({*self._loaded_with({*names - direct})} - names) if names - direct else ()
        if left:
            raise refusals.together(sorted(names - direct), left)
        self._part, self._direct = names, direct

    def start(self) -> None:
        self.forget()
        self.touched = self.touched or not self._rehearsing
        sliced = self._sliced() if self.takes_slices else None
        if self._part is None:
            self._opened = self._open(None if sliced is None or not sliced.direct else sliced.loaded)
        else:
            rest = self._part - self._direct
            self._opened = self._open(rest) if rest else None
        self._targets = {} if sliced is None else sliced.targets(self._live())
        self._loading = True

    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Apply every pair, by the model's own loader; where slices come, some past it (`Slices.direct`)."""
        with torch.no_grad():
            self._model.load_weights(self._passing(pairs))

    def _passing(self, pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield what the model's loader takes; slices have no digests, as the transport has checked each block."""
        sliced = self._sliced() if self.takes_slices else None
        direct = self._direct if sliced is None else sliced.direct
        for name, tensor in pairs:
            digested = self.vouches and not self.takes_slices and not self._readable(name)
            self._handed[name] = tensor_digest(tensor) if digested else ""
            if name not in direct:
                yield name, tensor
            elif tensor is not self._targets.get(name):
                land(tensor, self._pieces[name])

    def finish(self) -> None:
        """End the load: bring the layers into the form that is computed with.

        Raises:
            IntegrityError: parameters that were announced did not come.
        """
        if not self._loading:
            return
        names = self.missing()
        if names:
            raise IntegrityError(
                f"{len(names)} of the parameters that were announced did not come, first {names[0]!r}",
                state="the model holds part of an update",
                hint="send the version again",
            )
        if self._opened is not None:
            self._close(self._opened)
        self._loading, self._targets, self._opened = False, {}, None

    def missing(self) -> list[str]:
        """Return the parameters of an unfinished load that did not come yet."""
        if not self._loading or self._rehearsing:
            return []
        sliced = self._sliced() if self.takes_slices else None
        comes = (meta.name for meta in self._params if self._part is None or meta.name in self._part)
        due = (name for name in comes if sliced is None or sliced.landing(name))
        return [name for name in due if name not in self._handed]

    def digests(self) -> dict[str, str]:
        found = dict(self._handed)
        for meta in self._params:
            if meta.name in found and self._readable(meta.name):
                found[meta.name] = tensor_digest(read(meta, self._pieces[meta.name]))
        return found

    def _readable(self, name: str) -> bool:
        """Return whether this worker holds the tensor whole, as it came."""
        return self._alone and bool(self._pieces.get(name))

    def forget(self) -> None:
        """Drop what is known of the model's bytes, and what was staged."""
        self._handed, self._whole = {}, []
        self._patcher.forget()

    def invalidate(self) -> None:
        self.forget()
        self.touched = True

    # changes

    def position_digests(self, digest: str) -> dict[str, str]:
        """Return position digests of what this worker reads back of its model, else of the start checkpoint.

        The checkpoint that the engine was started with counts while nothing else was loaded.

        Raises:
            ConfigError: neither can be had.
        """
        if self._alone and self._params and all(self.patchable(meta.name) for meta in self._params):
            return {name: one.hex() for name, one in self._together(self._patcher.held(digest)).items()}
        start = None if self.touched else self.start_weights()
        if start is None:
            raise ConfigError(
                "this engine cannot read its weights back, and they are not those that it was started with",
                hint="let the trainer send a full version first: leave base= out",
            )
        return {name: position_digest(tensor, digest).hex() for name, tensor in start}

    def stage(self, changes: Changes) -> None:
        """Translate changes of tensors that can be patched; bring the others to their new value on the host."""
        self._whole = []
        self._staged, self._expected = self._patcher.stage(changes), changes.digests
        names = self._loaded_with(self._patcher.others)
        self._whole = list(changes.whole(names)) if names else []
        compare({name: position_digest(tensor, changes.digest) for name, tensor in self._whole}, self._expected)

    @property
    def staged_bytes(self) -> int:
        """The memory that staged changes hold until the commit, in bytes."""
        return self._patcher.staged_bytes + sum(tensor.nbytes for _, tensor in self._whole)

    def confirm(self) -> None:
        """Compare what all workers of the engine staged with the trainer's digests."""
        compare(self._together(self._staged), self._expected)

    @torch.no_grad()
    def commit(self) -> None:
        self._handed, self.touched = {}, self.touched or not self._rehearsing
        self._patcher.commit()
        whole, self._whole = self._whole, []
        if whole:
            layers = self._open(None if self._whole_model else [name for name, _ in whole])
            self._model.load_weights(iter(whole))
            self._close(layers)

    def _together(self, own: Mapping[str, PositionDigest]) -> dict[str, PositionDigest]:
        """Return digests of the tensors that the workers hold together; those that overlap in part are left out."""
        return combine(own, self._patcher.pieces, self._params, self._group)


_UNKNOWN = "layers of this model rebuild their weights after loading, so that it is not known which parts they take"


def _shapes_of(checkpoint: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint on this machine by name; nothing for any other."""
    try:
        return {meta.name: meta.shape for meta in CheckpointSource(checkpoint).params()}
    except (ConfigError, IntegrityError):
        return {}
