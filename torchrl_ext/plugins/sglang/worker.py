"""One worker of an SGLang server: a `WorkerEnd` whose messages come and are answered as SGLang's strings.

SGLang hands a message to every worker at the same point of its loop, in the thread that generates
(`torchrl_ext.plugins.sglang.register`). Each answers with a string, and the first worker's goes back. Beside what a
`WorkerEnd` does, a worker does here

=================  ==============================================================================================
`Flush`            drop cached keys and values. Answer: ``{"flushed": bool}``, false while requests hold on to them
`State`            adds ``{"paused": bool, "asleep": [tags]}``
`Finish`           labels requests with the version from here on
`CheckAdapter`     is asked by the process that looks names up (`torchrl_ext.plugins.sglang.adapters`)
=================  ==============================================================================================
"""

from __future__ import annotations

import json
import logging
from contextlib import closing
from typing import Any, Protocol

import torch
from torch import distributed, nn

from torchrl_ext.messages import Finish, Join, Load, Message, Prefetch, Reset, Start, State, partial_version
from torchrl_ext.plugins.loader import EngineLoader
from torchrl_ext.plugins.sglang.model import SGLangModel
from torchrl_ext.plugins.sglang.routes import Land
from torchrl_ext.plugins.workers import agree
from torchrl_ext.routes import Flush
from torchrl_ext.sync.worker_end import WorkerEnd, words_of
from torchrl_ext.transports.published import PublishedRoot
from torchrl_ext.types import Info

__all__ = ["SGLangWorker"]

log = logging.getLogger("torchrl_ext")


class Scheduler(Protocol):
    """The part of SGLang that a worker's messages use (`SchedulerWeightUpdaterManager`)."""

    scheduler: Any
    offload_tags: set[str]

    def flush_cache(self, *, empty_cache: bool) -> bool:
        """Drop cached keys and values, unless requests hold on to them; with ``empty_cache`` free memory as well."""

    def record_weight_version_after_update(self, weight_version: str) -> None:
        """Label what is generated from here on with this version."""


class SGLangWorker:
    """Keeps one worker's model up to date.

    Args:
        model: the worker's model.
        checkpoint: the directory that it was loaded from.
        group: the tensor-parallel workers of this server, on the CPU.
        **settings: of `SGLangModel`.
    """

    def __init__(self, model: nn.Module, checkpoint: str, group: distributed.ProcessGroup, **settings: Any) -> None:
        self._checkpoint = checkpoint
        self._model = SGLangModel(model, checkpoint, group, **settings)
        self._end = WorkerEnd(
            EngineLoader(self._model),
            rank=distributed.get_rank(group),
            workers=distributed.get_world_size(group),
            agree=lambda words: agree(words, group),
            mode=torch.inference_mode,
            base=checkpoint,
        )
        self._joined: tuple[str, Any] | None = None

    @torch.inference_mode()
    def answer(self, message: Message, scheduler: Scheduler) -> tuple[bool, str]:
        """Do what a message says, and return whether that went well, and the answer. Never raises."""
        try:
            return True, json.dumps(self._answer(message, scheduler))
        except Exception as error:  # noqa: BLE001 - told to the caller, whatever it is
            return False, words_of(error)

    def invalidate(self) -> None:
        """Note that SGLang loaded the model by itself: the next version does not build on what it holds."""
        self._model.unpacked = False
        self._end.receiver.invalidate()

    def reloaded(self) -> None:
        """Note that SGLang loaded a whole checkpoint by itself."""
        self._model.unpacked = False
        self._end.receiver.handle(Reset(weights="reloaded"))

    def refuse_parts(self) -> None:
        """Refuse to generate with a part of an update.

        Raises:
            EngineRefusedError: the model holds one.
        """
        if not self._end.receiver.whole:
            raise partial_version("the engine")

    def _answer(self, message: Message, scheduler: Scheduler) -> Info:
        match message:
            case Flush():
                return {"flushed": _flush(scheduler)}
            case State():
                paused = bool(getattr(scheduler.scheduler, "_engine_paused", False))
                asleep = sorted(getattr(scheduler, "offload_tags", ()))
                return {"paused": paused, "asleep": asleep, **self._end.handle(message)}
            case Join():
                self._joined = None
            case Start():
                self._model.prepared = message.bracketed
        answer = self._end.handle(message)
        if isinstance(message, Finish):
            scheduler.record_weight_version_after_update(str(message.version))
        return answer

    @torch.inference_mode()
    def land(self, path: str, call: Land) -> tuple[bool, str]:
        """Bring the model to the version at ``path``, as ``load_format="delta"`` wants it. Never raises.

        Args:
            path: a version directory ``weight_v000007``, or the root that holds it (then the newest version is taken).
            call: what the server's process says of the call.
        """
        receiver, together = self._end.receiver, self._end.together
        root: PublishedRoot
        version = 0
        params: list[Any] = []
        own: list[str] | None = None

        def look() -> None:
            nonlocal root, version, params, own
            root, version = PublishedRoot.of_path(path, self._checkpoint)
            params, own = root.contents(version, call.files, parts=call.paused)

        def join() -> None:
            with closing(root):
                receiver.connect(Join.of(root.invite(params)))

        def commit() -> None:
            self._model.prepared = False
            receiver.start()
            receiver.load(Load(version=version, handoff={"params": params}))
            receiver.finish(version)

        try:
            self._end.settle()
            together(look)
            if self._joined != (root.root, params):
                together(join)
                self._joined = (root.root, params)
            together(lambda: receiver.prefetch(Prefetch(version=version, files=own, label=call.label)))
            together(receiver.confirm)
            together(commit)
        except Exception as error:  # noqa: BLE001 - as for `answer`
            self._joined = None
            return False, words_of(error)
        return True, f"version {version} of {root.root} is in service"


def _flush(manager: Scheduler) -> bool:
    """Drop cached keys and values; return False while requests hold on to them.

    Releases differ in whether requests count that wait in a paused engine and hold none: 0.5.19 would wait for them.
    """
    scheduler = manager.scheduler
    waiting = scheduler.waiting_queue
    if not getattr(scheduler, "_engine_paused", False) or any(request.kv.holds_kv for request in waiting):
        return bool(manager.flush_cache(empty_cache=False))
    scheduler.waiting_queue = []
    try:
        return bool(manager.flush_cache(empty_cache=False))
    finally:
        scheduler.waiting_queue = waiting
