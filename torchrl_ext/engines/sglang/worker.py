"""One worker of an SGLang server: a `EngineWorker` whose messages come and are answered as SGLang's strings.

SGLang hands a message to every worker at the same point of its loop, in the thread that generates
(`torchrl_ext.engines.sglang.register`). Each answers with a string, and the first worker's goes back. Beside what a
`EngineWorker` does, a worker does here

=================  ==============================================================================================
`Flush`            drop cached keys and values. Answer: ``{"flushed": bool}``, false while requests hold on to them
`State`            adds ``{"paused": bool, "asleep": [tags]}``
`Start`            waits for the device, where a pause in place leaves a batch that still reads weights
`Finish`           labels requests with the version from here on
=================  ==============================================================================================
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from torchrl_ext.base.messages import Finish, Message, Start, State
from torchrl_ext.base.routes import Flush
from torchrl_ext.base.types import Info
from torchrl_ext.engines.loader import EngineLoader
from torchrl_ext.engines.plugin import agree
from torchrl_ext.engines.sglang.model import SGLangModel
from torchrl_ext.sync.engine_worker import EngineWorker

__all__ = ["SGLangWorker"]


class SGLangWorker:
    """Keeps one worker's model up to date.

    Args:
        runner: SGLang's `ModelRunner`.

    Attributes:
        end: handles messages, and knows what the model holds.
    """

    def __init__(self, runner: Any) -> None:
        self._model = SGLangModel(runner)
        group = self._model.group
        self.end = EngineWorker(
            EngineLoader(self._model),
            rank=distributed.get_rank(group),
            workers=distributed.get_world_size(group),
            agree=lambda words: agree(words, group),
            mode=torch.inference_mode,
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
        self._model.asleep = "weights" in asleep
        match message:
            case Flush():
                return {"flushed": bool(scheduler.flush_cache(empty_cache=False))}
            case State():
                paused = bool(getattr(scheduler.scheduler, "_engine_paused", False))
                return {"paused": paused, "asleep": asleep, **self.end.handle(message)}
            case Start():
                scheduler.scheduler.device_module.synchronize()
                self._model.prepared = message.bracketed
        answer = self.end.handle(message)
        if isinstance(message, Finish):
            scheduler.record_weight_version_after_update(str(message.version))
        return answer
