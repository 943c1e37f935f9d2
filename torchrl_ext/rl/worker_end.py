"""`WorkerTransport`, the worker end of a scheme: a `WeightReceiver` answers the trainer's messages."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import DeadlineError, NotConnectedError, TransportError, WeightSyncError, why
from torchrl_ext.base.messages import Finish, Message, read
from torchrl_ext.base.types import Info
from torchrl_ext.rl.links import dial
from torchrl_ext.rl.policy_loader import ModelLoader
from torchrl_ext.sync.receiver import WeightReceiver

__all__ = ["WorkerTransport"]

log = logging.getLogger("torchrl_ext")


class WorkerTransport:
    """The worker end of a scheme: a `WeightReceiver` carries out each step of an update that the trainer requests.

    The caller's thread answers the trainer until the first weights have landed; then the thread in `serve` does.

    Args:
        trainer: host, port and token of the trainer's hub; None if there is no trainer.
        model: returns the object that receives the weights.
        timeout_s: deadline for connecting, for each message until the first weights have landed, and for sending an
            answer, in seconds.
    """

    def __init__(
        self, trainer: tuple[str, int, str] | None, model_id: str, model: Callable[[], Any], timeout_s: float
    ) -> None:
        self._trainer, self._model_id, self._model, self._timeout_s = trainer, model_id, model, timeout_s
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
        self._receiver = WeightReceiver(ModelLoader(self._model, device=welcome["device"], tied=welcome["tied"]))
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
            raise DeadlineError(f"no weights came from {self._link.peer} within {self._timeout_s:g} s")
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
