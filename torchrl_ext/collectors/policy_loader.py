"""Lands weights in a collector's worker, whose policy may still be on the meta device or carry extra state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from torchrl_ext.errors import ManifestError
from torchrl_ext.landing.loader import Changes, TensorsLoader, WeightLoader
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.derived import stacked
from torchrl_ext.weights.source import as_source, named_tensors, unwrapped

__all__ = ["EXTRA", "ModelLoader", "other_names"]

EXTRA = "__extra_state__"
"""The key under which TorchRL's `WeightStrategy` carries what `nn.Module.get_extra_state` returns."""


def other_names(weights: Any) -> dict[str, str]:
    """Return the names of tied tensors that do not travel, each with the name under which its tensor does."""
    return dict(as_source(weights).tied())


class ModelLoader(WeightLoader):
    """Lands weights in the model that a scheme has at the moment of each update.

    A collector sends its workers policies without storage (meta tensors), and may put a copy in the policy's place
    after the first weights came. A meta tensor is replaced by what arrives, on ``device``; another is written in place.

    Args:
        model: returns the module, TensorDict or mapping that the scheme has now.
        device: where parameters that are on the meta device go; None: where they arrive.
        tied: names that do not travel -> names that do, for models whose ties were lost with their storage.
    """

    parts: ClassVar[bool] = True

    def __init__(
        self, model: Callable[[], Any], *, device: str | None = None, tied: Mapping[str, str] | None = None
    ) -> None:
        self._get, self._device, self._tied = model, device, dict(tied or {})
        self._loader: TensorsLoader | None = None
        self._model: Any = None
        self._sent: list[ParamMeta] | None = None
        self._extra: dict[str, Tensor] = {}

    def check(self, params: Iterable[ParamMeta]) -> None:
        sent = [meta for meta in params if not _is_extra(meta.name)]
        if self._bare():
            names = {meta.name: meta for meta in sent}
            own = self._current().names()
            sent += [ParamMeta(name, names[via].dtype, names[via].shape) for name, via in self._tied.items()
                     if name in own and via in names and name not in names]  # fmt: skip
        self._sent = None
        try:
            self._current().check(sent)
        except ManifestError as error:
            raise ManifestError(
                error.what, expected=error.expected, state=error.state, hint="send the weights of a policy of one class"
            ) from error
        self._sent = sent

    def part(self, names: frozenset[str] | None) -> None:
        self._current().part(None if names is None else frozenset(name for name in names if not _is_extra(name)))

    def start(self) -> None:
        self._extra = {}

    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        if self._bare():
            self._fill(dict(self._plain(pairs)))
        else:
            self._current().load(self._plain(pairs))

    def finish(self) -> None:
        if self._extra:
            extra, self._extra = self._extra, {}
            self._current_model().set_extra_state({name.removeprefix(f"{EXTRA}."): t for name, t in extra.items()})

    def targets(self) -> Mapping[str, Tensor]:
        return {} if self._bare() else self._current().targets()

    def patchable(self, name: str) -> bool:
        return not _is_extra(name)  # a model without storage has it by the first version, which comes in full

    def position_digests(self) -> dict[str, str]:
        return {} if self._bare() else self._current().position_digests()

    def stage(self, changes: Changes) -> None:
        self._extra = dict(changes.whole([name for name in changes.digests if _is_extra(name)]))
        plain = {name: digest for name, digest in changes.digests.items() if not _is_extra(name)}
        self._current().stage(
            replace(
                changes,
                digests=plain,
                patches=lambda wanted: changes.patches(lambda name: not _is_extra(name) and wanted(name)),
            )
        )

    def commit(self) -> None:
        self._current().commit()

    def resident(self) -> Iterator[tuple[str, Tensor]]:
        return self._current().resident()

    def digests(self) -> dict[str, str]:
        return self._current().digests()

    def proof(self) -> str:
        return "in place"

    def _plain(self, pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in pairs:
            if _is_extra(name):
                self._extra[name] = tensor.clone()
            else:
                yield name, tensor

    def _current_model(self) -> Any:
        model = self._get()
        if model is None:
            raise ManifestError("the model of this worker no longer exists", hint="keep the collector's policy alive")
        return model

    def _current(self) -> TensorsLoader:
        model = self._current_model()
        if self._loader is None or model is not self._model:
            self._loader, self._model = TensorsLoader(model), model
            if self._sent is not None:  # a new loader has to check what the one before did
                self._loader.check(self._sent)
        return self._loader

    def _bare(self) -> bool:
        """Return whether the model has tensors without storage."""
        model = self._current_model()
        return isinstance(model, nn.Module) and any(tensor.is_meta for _, tensor in named_tensors(model, scratch=True))

    def _fill(self, received: Mapping[str, Tensor]) -> None:
        """Put the tensors that arrived in the place of the model's own; tied names get one tensor."""
        model, made = self._current_model(), {}
        tied = {name: via for name, via in self._tied.items() if name not in received and via in received}
        received = stacked(model, {**received, **{name: received[via] for name, via in tied.items()}})
        for path, module in model.named_modules(remove_duplicate=False):
            for held in (module._parameters, module._buffers):
                for own, tensor in held.items():
                    name = unwrapped(f"{path}.{own}" if path else own)
                    if tensor is None or name not in received:
                        continue
                    arrived = received[name]
                    if id(arrived) not in made:
                        made[id(arrived)] = _like(tensor, arrived, self._device)
                    held[own] = made[id(arrived)]
        self._current().invalidate()
        for name, tensor in named_tensors(model, scratch=True):
            if tensor.is_meta:
                raise ManifestError(
                    f"{name!r} of the policy has no storage, and did not come with the weights",
                    hint="use strategy='tensordict', which sends buffers that are not persistent too",
                )


def _like(old: Tensor, new: Tensor, device: str | None) -> Tensor:
    new = new.to(device) if device else new
    if new.untyped_storage().nbytes() != new.nbytes:
        new = new.clone()  # a slice would keep its whole bucket in memory
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new


def _is_extra(name: str) -> bool:
    return name.startswith(f"{EXTRA}.")
