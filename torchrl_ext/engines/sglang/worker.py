"""One worker of an SGLang server: a `EngineWorker` whose messages come and are answered as SGLang's strings.

SGLang hands a message to every worker at the same point of its loop, in the thread that generates
(`torchrl_ext.engines.sglang.register`). Each answers with a string, and the first worker's goes back. Beside what a
`EngineWorker` does, a worker does here

=================  ==============================================================================================
`Flush`            drop cached keys and values. Answer: ``{"flushed": bool}``, false while requests hold on to them
`State`            adds ``{"paused": bool, "asleep": [tags]}``
`Start`            waits for the device, where a pause in place leaves a batch that still reads weights
`Finish`           labels requests with the version from here on
`Commit`, `Undo`   between two batches, on all workers or on none; label requests, and part their cached keys and values
=================  ==============================================================================================
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from torchrl_ext.base.errors import EngineRefusedError, WeightSyncError
from torchrl_ext.base.messages import Commit, Finish, Message, Start, State, Undo, partial_version
from torchrl_ext.base.routes import Flush, version_label
from torchrl_ext.base.types import Info
from torchrl_ext.engines.loader import EngineLoader
from torchrl_ext.engines.plugin import agree
from torchrl_ext.engines.sglang import keys
from torchrl_ext.engines.sglang.model import SGLangModel
from torchrl_ext.sync.engine_worker import EngineWorker

__all__ = ["SGLangWorker"]

_OBSTACLES = {
    "enable_pdmux": "a prefill may be between two layers (--enable-pdmux)",
    "enable_streaming_session": "streaming sessions keep keys and values between requests",
    "enable_dp_attention_local_control_broadcast": "its workers hear of it at different batches",
}
"""By the setting of a server why it takes no version while it serves."""


class SGLangWorker:
    """Keeps one worker's model up to date.

    Args:
        runner: SGLang's `ModelRunner`.

    Attributes:
        end: handles messages, and knows what the model holds.
    """

    def __init__(self, runner: Any) -> None:
        self._model = SGLangModel(runner)
        self._obstacle, group = "", self._model.group
        self.end = EngineWorker(
            EngineLoader(self._model),
            rank=distributed.get_rank(group),
            workers=distributed.get_world_size(group),
            agree=lambda words: agree(words, group),
            mode=torch.inference_mode,
            obstacle=lambda: self._obstacle,
        )

    @torch.inference_mode()
    def answer(self, message: Message, scheduler: Any) -> Info:
        """Do what a message says, and return the answer.

        Args:
            message: of the trainer.
            scheduler: SGLang's `SchedulerWeightUpdaterManager`.

        Raises:
            WeightSyncError: see `EngineWorker.handle`.
        """
        asleep = sorted(getattr(scheduler, "offload_tags", ()))
        self._model.asleep, self._obstacle = "weights" in asleep, _obstacle(scheduler)
        match message:
            case Flush():
                keys.drop_images()
                return {"flushed": bool(scheduler.flush_cache(empty_cache=False))}
            case State():
                paused = bool(getattr(scheduler.scheduler, "_engine_paused", False))
                return {"paused": paused, "asleep": asleep, **self.end.handle(message)}
            case Start():
                scheduler.scheduler.device_module.synchronize()
                self._model.prepared = message.bracketed
            case Commit() | Undo():
                return self._switch(message, scheduler)
        answer = self.end.handle(message)
        if isinstance(message, Finish):
            scheduler.record_weight_version_after_update(str(message.version))
        return answer

    def _switch(self, message: Commit | Undo, manager: Any) -> Info:
        """Change the version between two batches, on all workers or on none; the engine pauses if neither is possible.

        All of them are at the same point of their loops, and only the first one's answer is heard.
        """
        receiver, scheduler, answer = self.end.receiver, manager.scheduler, dict[str, Any]()
        receiver.refuse_replaced(message)
        obstacle = self._obstacle if isinstance(message, Commit) else "the weights sleep" * self._model.asleep
        if obstacle:
            words = f"version {message.version} is not for an engine in this state: {obstacle}"
            raise EngineRefusedError(words, state="nothing was changed")
        # the batch that is launched still reads weights, and the next one waits for this stream (`Scheduler.run_batch`)
        scheduler.device_module.current_stream().wait_stream(scheduler.forward_stream)
        held = receiver.held

        def back() -> None:
            if receiver.held != held:
                if isinstance(message, Undo):
                    raise partial_version("the engine")
                self.end.handle(Undo(version=message.version))

        try:
            self.end.together(lambda: answer.update(self.end.handle(message)))
        except WeightSyncError:
            try:
                self.end.together(back)
            except WeightSyncError:
                scheduler._engine_paused = True
                receiver.invalidate(torn=True)
            raise
        if receiver.held != held:  # else it was sent again
            manager.record_weight_version_after_update(version_label(answer["version"]))
            if not getattr(message, "keep_cache", False):
                keys.part(scheduler)
        return answer


def _obstacle(manager: Any) -> str:
    """Return why a server takes no version while it serves; "" if it may. All of its workers say the same."""
    scheduler = manager.scheduler
    settings = getattr(scheduler, "server_args", None)
    if getattr(scheduler, "_engine_paused", False):
        return "the engine is paused"
    if getattr(manager, "offload_tags", ()):
        return "some of its memory sleeps"
    if getattr(manager, "_session", None) is not None:
        return "a session for an update of weights is open"
    if getattr(settings, "disaggregation_mode", "null") != "null":
        return "each request is halved between prefill and decode engines"
    return next((words for name, words in _OBSTACLES.items() if getattr(settings, name, False)), "")
