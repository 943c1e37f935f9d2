"""The worker end of a scheme: `WorkerTransport` answers the trainer's messages, and `ModelLoader` lands the weights."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import (
    DeadlineError,
    ManifestError,
    NotConnectedError,
    TransportError,
    WeightSyncError,
    why,
)
from torchrl_ext.base.messages import Finish, Message, read
from torchrl_ext.base.types import Info, ParamMeta
from torchrl_ext.data.landing.loader import Patchable, TensorsLoader, WeightLoader
from torchrl_ext.data.landing.patcher import Changes
from torchrl_ext.data.weights.digests import digests_of
from torchrl_ext.data.weights.source import unwrapped
from torchrl_ext.rl.links import dial
from torchrl_ext.sync.receiver import WeightReceiver

__all__ = ["ModelLoader", "WorkerTransport"]

log = logging.getLogger("torchrl_ext")

_EXTRA = "__extra_state__"
"""The key under which TorchRL's `WeightStrategy` sends the result of `nn.Module.get_extra_state`."""


class WorkerTransport:
    """The worker end of a scheme: a `WeightReceiver` carries out each step of an update that the trainer requests.

    The caller's thread answers the trainer until the first weights have landed; then the thread in `serve` does.

    Args:
        trainer: host, port and token of the trainer's hub; None if there is no trainer.
        model: returns the object that receives the weights.
        timeout_s: deadline for connecting, for each message until the first weights have landed, and for sending an
            answer, in seconds.
        device: where a policy on the meta device gets its storage; None for the device of the trainer's weights.
    """

    def __init__(
        self,
        trainer: tuple[str, int, str] | None,
        model_id: str,
        model: Callable[[], Any],
        timeout_s: float,
        device: torch.device | str | None = None,
    ) -> None:
        self._trainer, self._model_id, self._model, self._timeout_s = trainer, model_id, model, timeout_s
        self._device = device
        self._link: Any = None  # None until connected
        self._receiver = WeightReceiver()
        self._news = threading.Condition()
        self._fresh = self._stopped = False

    def setup_connection_and_weights_on_receiver(self, *, worker_idx: int | None = None, **_: Any) -> None:
        """Connect, and return when the first weights have landed or the trainer says that none will come.

        Args:
            worker_idx: this worker's index; None for 0.

        Raises:
            DeadlineError: the trainer does not answer or sends nothing.
            NotConnectedError: there is no trainer, it has ended, or it refuses this worker.
            WeightSyncError: the weights cannot land here.
        """
        if self._trainer is None:
            raise NotConnectedError(
                f"the scheme of model {self._model_id!r} has no trainer",
                hint="call init_on_sender before the scheme is handed to its workers",
            )
        self._link, welcome = dial(self._trainer, self._model_id, worker_idx or 0, self._timeout_s)
        device = self._device or welcome["device"]
        self._receiver = WeightReceiver(ModelLoader(self._model, device=device, tied=welcome["tied"]))
        try:
            while not isinstance(done := self._answer(Deadline(self._timeout_s)), Finish | None):
                if isinstance(done, Exception):
                    raise done
        except BaseException:
            self.shutdown()
            self._receiver.close()
            raise
        self._fresh = False  # `receive_weights` reports only later versions

    def serve(self, landed: Callable[[], None]) -> None:
        """Answer the trainer until it disconnects or `shutdown` is called.

        Args:
            landed: called when a version has landed, before it is acknowledged; its errors are sent to the trainer.
        """
        try:
            while not self._stopped:
                self._answer(None, landed)
        except (TransportError, DeadlineError) as error:
            if not self._stopped:
                log.info("%s; this worker keeps its weights, version %d", error.what, self._receiver.version)
        finally:
            self._receiver.close()
            with self._news:
                self._stopped = True
                self._news.notify_all()

    def receive_weights(
        self, timeout: float | None = None, *, model: Any = None, strategy: Any = None, **_: Any
    ) -> Any | None:
        """Wait until `serve` has landed a version since the last call.

        Args:
            timeout: seconds to wait; None waits as long as the trainer is connected.
            model, strategy: TorchRL's; the strategy extracts the returned weights from the model.

        Returns:
            The model's weights; None if nothing new came.
        """
        with self._news:
            self._news.wait_for(lambda: self._fresh or self._stopped, timeout)
            fresh, self._fresh = self._fresh, False
        return strategy.extract_weights(model) if fresh else None

    def send_ack(self, message: str = "updated") -> None:
        """Note that TorchRL's `apply_weights`, which calls this, has written its own weights."""
        if self._link is not None:
            self._receiver.invalidate()  # the next version must not build on them

    def shutdown(self) -> None:
        """Disconnect from the trainer, which ends `serve`. May be called twice."""
        self._stopped = True
        self._receiver.abort()
        if self._link is not None:
            self._link.close()

    def _answer(self, within: Deadline | None, landed: Callable[[], None] = lambda: None) -> Message | Exception | None:
        """Answer the trainer's next question; return its message, None without one, or the error that it caused."""
        request = self._link.read(within)
        if request is None:
            raise DeadlineError(
                f"no weights came from {self._link.peer} within {self._timeout_s:g} s",
                hint="check whether the trainer still sends, or raise the scheme's timeout_s",
            )
        done: Message | Exception | None = None
        answer: Info = {"answer": {}}
        try:
            if "message" in request:
                done = read(request["message"])
                answer = {"answer": self._receiver.handle(done)}
            if isinstance(done, Finish):
                landed()
        except Exception as error:  # noqa: BLE001 - every error is sent to the trainer
            done, answer = error, {"error": str(error) if isinstance(error, WeightSyncError) else why(error)}
        self._link.send({"number": request.get("number"), **answer}, Deadline(self._timeout_s))
        if isinstance(done, Finish):
            with self._news:  # after the answer: a woken caller may close the link
                self._fresh = True
                self._news.notify_all()
        return done


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

    def __init__(self, model: Callable[[], Any], *, device: Any = None, tied: Mapping[str, str] | None = None) -> None:
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
        self._current().check(sent)
        self._sent = sent

    def start(self) -> None:
        self._extra = {}

    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        self._current().load(self._plain(pairs))

    def finish(self) -> None:
        self._empty = False
        if self._extra:
            extra = {name.removeprefix(f"{_EXTRA}."): tensor.clone() for name, tensor in self._extra.items()}
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
    return name.startswith(f"{_EXTRA}.")
