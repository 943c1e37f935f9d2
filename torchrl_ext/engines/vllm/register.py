"""Entry point of group ``vllm.general_plugins``: adds the weight-transfer backend ``torchrl_ext`` to a stock vLLM.

vLLM calls `register` in its API, core and worker processes; only the worker ever imports the backend itself. Start the
server with ``--weight-transfer-config '{"backend": "torchrl_ext"}'`` and ``VLLM_SERVER_DEV_MODE=1``. An engine object
that was made with another backend, or with none, gets ours by the collective call `TAKE_OVER`, which workers get here.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from torchrl_ext.base.messages import partial_version
from torchrl_ext.base.routes import ANSWERS, BACKEND, TAKE_OVER, out_of_step
from torchrl_ext.engines.plugin import enable

__all__ = ["register", "register_trainers"]

log = logging.getLogger("torchrl_ext")

_BACKEND, _TRAINER = "torchrl_ext.engines.vllm.engine", "torchrl_ext.compat.vllm_api"
_WHOLE = "torchrl_ext_whole"
"""The collective call that asks vLLM's workers whether they may generate."""
_FAILURES = (
    "vllm.v1.executor.multiproc_executor",  # of workers
    "vllm.v1.engine.core",
    "vllm.entrypoints.serve.exception_handling.handlers.exception",  # of the API server
    "uvicorn.error",
)
"""Loggers of exceptions that leave a worker, in each process that they pass."""


@functools.cache
def register() -> None:
    """Register the backend with vLLM. May be called any number of times.

    vLLM calls it outside any ``try``, in every process of every server of the environment that has this package, so it
    raises nothing.
    """
    enable("vLLM 0.32.0", _use)
    for name in _FAILURES:
        logging.getLogger(name).addFilter(_is_failure)


def _use() -> None:
    _extend_workers()
    _keep_in_step()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # last: a server of another release does not start with our backend
    WeightTransferEngineFactory.register_engine(BACKEND, _BACKEND, "TorchRLExtEngine")
    register_trainers()


def _is_failure(record: logging.LogRecord) -> bool:
    """Return False for a record of a worker's answer, which is raised as an exception; log it as a debug line."""
    error = (record.exc_info or sys.exc_info())[1]
    if ANSWERS not in str(error):
        return True
    log.debug("%s", error)
    return False


def register_trainers() -> None:
    """Register the trainer's end of the backend with vLLM's factory. May be called any number of times."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    with suppress(ValueError):  # it is registered already
        WeightTransferTrainerFactory.register_engine(BACKEND, _TRAINER, "TorchRLExtTrainerEngine")


def _extend_workers() -> None:
    """Give workers our methods, have them notice when vLLM loads a checkpoint or sleeps, and guard their resuming.

    `WorkerBase.__init__` is wrapped, three methods of each worker, and `EngineCore.resume_scheduler`.
    """
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerBase

    begin = WorkerBase.__init__

    def init(worker: Any, *args: Any, **settings: Any) -> None:
        begin(worker, *args, **settings)
        for name, around in {"reload_weights": _reload, "sleep": _sleep, "wake_up": _wake_up}.items():
            method = getattr(worker, name, None)
            if method is not None:
                setattr(worker, name, functools.partial(around, worker, method))

    EngineCore.resume_scheduler = _refusing_parts(EngineCore.resume_scheduler)
    WorkerBase.__init__ = init
    for name, method in {TAKE_OVER: _take_over, _WHOLE: _is_whole}.items():
        if name not in vars(WorkerBase):
            setattr(WorkerBase, name, method)


def _reload(worker: Any, reload: Callable[..., None], *args: Any, **settings: Any) -> None:
    whole = False
    try:
        reload(*args, **settings)
        whole = True
    finally:
        engine = _engine_of(worker)
        if engine is not None:
            engine.invalidate(whole=whole)


def _sleep(worker: Any, sleep: Callable[..., None], *args: Any, **settings: Any) -> None:
    engine = _engine_of(worker)
    if engine is not None:
        engine.sleep()
    worker.torchrl_ext_asleep = True  # also where another backend is taken over later
    sleep(*args, **settings)


def _wake_up(worker: Any, wake: Callable[..., None], tags: list[str] | None = None) -> None:
    wake(tags)
    if tags is None or "weights" in tags:
        worker.torchrl_ext_asleep = False
        engine = _engine_of(worker)
        if engine is not None:
            engine.wake()


def _engine_of(worker: Any) -> Any:
    """Return the backend of a worker where it is ours, else None."""
    ours = sys.modules.get(_BACKEND)  # imported once a worker has our backend
    engine = getattr(worker, "weight_transfer_engine", None)
    return engine if ours is not None and isinstance(engine, ours.TorchRLExtEngine) else None


def _take_over(worker: Any) -> None:
    """Give a worker our backend in place of the one that it was made with, if any. May be called any number of times.

    Raises:
        RuntimeError: an update through the other backend is open; all workers of an engine raise it, or none.
    """
    from vllm.config import WeightTransferConfig

    from torchrl_ext.engines.vllm.engine import TorchRLExtEngine

    if _engine_of(worker) is not None:
        return
    if worker._weight_update_active:
        raise RuntimeError("an update of another trainer is open; end it before this engine follows a new trainer")
    other, model = worker.weight_transfer_engine, worker.model_runner.get_model()
    config = WeightTransferConfig(backend=BACKEND)
    worker.weight_transfer_engine = TorchRLExtEngine(config, worker.vllm_config, worker.device, model)
    if getattr(worker, "torchrl_ext_asleep", False):
        worker.weight_transfer_engine.sleep()
    if other is not None:
        other.shutdown()


def _refusing_parts(resume: Callable[[Any], None]) -> Callable[[Any], None]:
    """Keep an engine paused that holds a part of an update, whoever calls ``/resume`` or ``/wake_up``."""

    @functools.wraps(resume)
    def resumed(core: Any) -> None:
        found = core.model_executor.collective_rpc(_WHOLE)
        if not all(isinstance(whole, bool) for whole in found):
            raise out_of_step()
        if not all(found):
            raise partial_version("the engine")
        resume(core)

    return resumed


def _is_whole(worker: Any) -> bool:
    """Return whether a worker holds one version, whole; of another backend than ours nobody knows better."""
    engine = _engine_of(worker)
    return engine is None or bool(engine.whole)


def _keep_in_step() -> None:
    """Have vLLM's executor of several workers pass over the replies that it left unread when a call failed.

    `MultiprocExecutor.collective_rpc` reads the replies to a call in order of rank, and raises at the
    first bad one: those behind it would answer the next call, and so on for good.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    call = MultiprocExecutor.collective_rpc
    if "response_mqs" not in call.__code__.co_names:
        raise AttributeError("MultiprocExecutor.collective_rpc does not read its response_mqs")

    @functools.wraps(call)
    def in_step(executor: Any, *args: Any, **settings: Any) -> Any:
        if not isinstance(executor.response_mqs, _Replies):
            executor.response_mqs = _Replies(executor.response_mqs)
        return call(executor, *args, **settings)

    MultiprocExecutor.collective_rpc = in_step


class _Replies(Sequence[Any]):
    """The queues of workers' replies: the next call reads either one worker's, or all of them in turn."""

    def __init__(self, queues: Sequence[Any]) -> None:
        self._queues = [(queue, deque[_Reply]()) for queue in queues]

    def __len__(self) -> int:
        return len(self._queues)

    def __getitem__(self, rank: Any) -> Any:
        queue, due = self._queues[rank]
        return _Reply(queue, due, [])

    def __iter__(self) -> Iterator[Any]:
        call: list[_Reply] = []
        return iter([_Reply(queue, due, call) for queue, due in self._queues])


class _Reply:
    """A worker's queue as one call reads it. Calls are read in the order in which they were sent.

    Args:
        queue: vLLM's `MessageQueue`.
        due: the calls that the worker has answered, or will, and whose replies nobody has read.
        call: the replies to this call; empty once the first was asked for, as all of its workers answer then.
    """

    def __init__(self, queue: Any, due: deque[_Reply], call: list[_Reply]) -> None:
        self._queue, self._due, self._call = queue, due, call
        call.append(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def dequeue(self, *args: Any, **settings: Any) -> Any:
        while self._call:
            one = self._call.pop()
            one._due.append(one)
        while True:
            reply = self._queue.dequeue(*args, **settings)
            if self._due.popleft() is self:
                return reply
