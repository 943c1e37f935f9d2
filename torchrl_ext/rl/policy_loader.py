"""Lands weights in a collector worker's model, which may be on the meta device or carry extra state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_ext.base.errors import ManifestError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.landing.changes import Changes
from torchrl_ext.data.landing.loader import Patchable, TensorsLoader, WeightLoader
from torchrl_ext.data.weights.digests import digests_of
from torchrl_ext.data.weights.source import unwrapped

__all__ = ["EXTRA", "ModelLoader"]

EXTRA = "__extra_state__"
"""The key under which TorchRL's `WeightStrategy` sends the result of `nn.Module.get_extra_state`."""


class ModelLoader(WeightLoader, Patchable):
    """Lands weights in the model that a scheme holds at the time of each update.

    A collector sends its workers policies on the meta device, and may replace the policy with a copy after the first
    weights. `check` gives meta tensors storage. Weights are written in place, and `digests` reads them back; for extra
    state, `digests` uses the value that `set_extra_state` was given.

    Args:
        model: returns the module, TensorDict or mapping that the scheme holds now.
        device: device on which meta tensors get storage; None for the CPU.
        tied: names that are not sent -> names that are (`WeightSource.tied`), for models that lost their ties with
            their storage.
    """

    def __init__(
        self, model: Callable[[], Any], *, device: str | None = None, tied: Mapping[str, str] | None = None
    ) -> None:
        self._get, self._device, self._tied = model, device or "cpu", dict(tied or {})
        self._loader: TensorsLoader | None = None
        self._model: Any = None
        self._sent: list[ParamMeta] | None = None
        self._extra: dict[str, Tensor] = {}
        self._empty = False

    def check(self, params: Iterable[ParamMeta]) -> None:
        sent = [meta for meta in params if not _is_extra(meta.name)]
        model, self._sent = self._current_model(), None
        if isinstance(model, nn.Module):
            self._give_storage(model, {meta.name for meta in sent})
        try:
            self._current().check(sent)
        except ManifestError as error:
            raise ManifestError(
                error.what,
                expected=error.expected,
                state=error.state,
                hint="send the weights of a policy of the same class",
            ) from error
        self._sent = sent

    def part(self, names: frozenset[str] | None) -> None:
        self._extra = {}
        self._current().part(None if names is None else frozenset(name for name in names if not _is_extra(name)))

    def start(self) -> None:
        self._extra = {}

    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        self._current().load(self._plain(pairs))

    def finish(self) -> None:
        self._empty = False
        if self._extra:
            extra = {name.removeprefix(f"{EXTRA}."): tensor.clone() for name, tensor in self._extra.items()}
            self._current_model().set_extra_state(extra)

    def targets(self) -> Mapping[str, Tensor]:
        return self._current().targets()

    def patchable(self, name: str) -> bool:
        return not _is_extra(name)  # a meta model gets its storage with the first version, sent in full

    def stage(self, changes: Changes) -> None:
        self._extra = dict(changes.whole([name for name in changes.digests if _is_extra(name)]))
        plain = {name: digest for name, digest in changes.digests.items() if not _is_extra(name)}
        self._current().stage(replace(changes, digests=plain))

    def commit(self) -> None:
        self._current().commit()

    def digests(self) -> dict[str, str]:
        extra = {name: one.hex() for name, one in digests_of(self._extra).items()}
        return extra if self._empty else self._current().digests() | extra

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
            if self._sent is not None:  # the new loader needs the same check
                self._loader.check(self._sent)
        return self._loader

    def _give_storage(self, model: nn.Module, sent: Collection[str]) -> None:
        """Give each meta tensor its own storage, and tied names one tensor."""
        made: dict[int, tuple[dict[str, Any], str]] = {}  # address -> (container, key)
        for path, module in model.named_modules():
            for held in (module._parameters, module._buffers):
                for own, tensor in held.items():
                    if tensor is None or not tensor.is_meta:
                        continue
                    name = unwrapped(f"{path}.{own}" if path else own)
                    if own in module._non_persistent_buffers_set and name not in sent:  # `check` reports the others
                        raise ManifestError(
                            f"{name!r} of the policy has no storage, and the weights do not include it",
                            hint="use strategy='tensordict', which also sends non-persistent buffers",
                        )
                    empty = torch.empty_like(tensor, device=self._device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    held[own] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                    made[empty.data_ptr()] = held, own
        if made:
            self._empty, places = True, TensorsLoader(model).targets()
            for name, via in self._tied.items():
                if name in places and via in places:
                    (held, own), (kept, kept_as) = (made[places[one].data_ptr()] for one in (name, via))
                    held[own] = kept[kept_as]


def _is_extra(name: str) -> bool:
    return name.startswith(f"{EXTRA}.")
