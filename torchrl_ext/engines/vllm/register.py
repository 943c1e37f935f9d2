"""Entry point of group ``vllm.general_plugins``, by which a stock vLLM follows our transports, without a flag of ours.

vLLM calls `register` in its API, core and worker processes. Workers get one method, `torchrl_ext.base.routes.CALL`,
which ``POST /collective_rpc`` calls on all of them where ``VLLM_SERVER_DEV_MODE=1`` is set: it takes a message as JSON
and returns the answer. Only the first message makes what handles them (`torchrl_ext.engines.vllm.worker`).

Beside that, cores change the version between two steps (`torchrl_ext.engines.vllm.switching`); workers notice when vLLM
itself loads weights or releases their memory; an engine that holds a part of a version stays paused, whoever resumes
it; no reply of a worker is ever taken for that to another call; and an engine's configuration (``/server_info``) says
that the plugin is there.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from torchrl_ext.base.messages import answered, partial_version
from torchrl_ext.base.routes import CALL
from torchrl_ext.base.types import Info
from torchrl_ext.engines.plugin import enable
from torchrl_ext.engines.vllm.switching import RESUMES, switch_between_steps

__all__ = ["register", "register_trainers"]

log = logging.getLogger("torchrl_ext")

_API = "torchrl_ext.compat.vllm_api"
_BACKEND = "torchrl_ext.compat.vllm_backend"
_NAME = "torchrl_ext"  # of the backend, below vLLM's trainer API


@functools.cache
def register() -> None:
    """Register with vLLM. May be called any number of times.

    vLLM calls it outside any ``try``, in every process of every server of the environment that has this package, so it
    raises nothing.
    """
    enable("vLLM 0.32.0", _use)


def _use() -> None:
    _keep_in_step()
    _hear_replicas()
    _extend_workers()
    switch_between_steps()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with suppress(ValueError):  # it is registered already
        WeightTransferEngineFactory.register_engine(_NAME, _BACKEND, "TorchRLExtEngine")
    register_trainers()
    _say_so()  # last: a server of another release does not say that it follows


def register_trainers() -> None:
    """Register the trainer's end of our backend with vLLM's factory. May be called any number of times."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    with suppress(ValueError):  # it is registered already
        WeightTransferTrainerFactory.register_engine(_NAME, _API, "TorchRLExtTrainerEngine")


def _say_so() -> None:
    """Have the configuration of every engine name the plugin, among vLLM's ``additional_config``."""
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config

    @functools.wraps(create)
    def named(args: Any, *more: Any, **settings: Any) -> Any:
        config = create(args, *more, **settings)
        if isinstance(config.additional_config, dict):
            config.additional_config = {**config.additional_config, CALL: True}
        return config

    EngineArgs.create_engine_config = named


def _extend_workers() -> None:
    """Give workers our methods, have them notice when vLLM loads or sleeps, and guard the resuming of engines."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerBase

    begin = WorkerBase.__init__

    @functools.wraps(begin)
    def init(worker: Any, *args: Any, **settings: Any) -> None:
        begin(worker, *args, **settings)
        worker.torchrl_ext_beside = beside = Beside(worker)
        for name, around in beside.around.items():
            method = getattr(worker, name, None)
            if method is not None:
                setattr(worker, name, functools.partial(around, method))

    EngineCore.resume_scheduler = _refusing_parts(EngineCore.resume_scheduler)
    WorkerBase.__init__ = init
    setattr(WorkerBase, CALL, lambda worker, text: worker.torchrl_ext_beside.answer(text))
    setattr(WorkerBase, RESUMES, lambda worker: worker.torchrl_ext_beside.may_resume())


class Beside:
    """What stands beside one of vLLM's workers: what vLLM did to the model, and ours from the first message on.

    Args:
        worker: vLLM's worker.

    Attributes:
        around: what is called in place of methods of the worker, with the method as its first argument.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._ours: Any = None
        self._asleep, self._lost, self._reloaded = frozenset[str](), False, False
        self.around: dict[str, Callable[..., Any]] = {
            "init_weight_transfer_engine": self._initialise,
            "reload_weights": self._loading,
            "update_weights": self._loading_a_part,
            "finish_weight_update": self._loading,
            "sleep": self._sleep,
            "discard": self._discard,
            "wake_up": self._wake_up,
        }

    @property
    def ours(self) -> Any:
        """Our worker (`torchrl_ext.engines.vllm.worker.VLLMWorker`), made now if it was not before."""
        if self._ours is None:
            from torchrl_ext.engines.vllm.worker import VLLMWorker

            self._ours = VLLMWorker(self._worker)
            self._ours.sleeps(self._asleep, dropped=self._lost)
            if self._reloaded:
                self._ours.loaded(whole=False)
        return self._ours

    def answer(self, text: str) -> Info:
        """Answer a message as JSON; never raises."""
        return answered(lambda message: self.ours.handle(message), text)

    def may_resume(self) -> bool:
        """Return whether the model holds one version, whole; of what nobody sent through us vLLM knows better."""
        return self._ours is None or self._ours.may_resume()

    def _is_backend(self) -> bool:
        """Return whether vLLM's weight transfer is ours, which hands all on to our worker."""
        return type(getattr(self._worker, "weight_transfer_engine", None)).__module__ == _BACKEND

    def _initialise(self, initialise: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        if self._is_backend():
            self._worker.weight_transfer_engine.ours = self.ours
        return initialise(*args, **settings)

    def _loading(self, load: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        if self._is_backend() and load.__name__ != "reload_weights":
            return load(*args, **settings)
        whole = False
        try:
            found = load(*args, **settings)
            whole = True
            return found
        finally:
            self._note_load(whole)

    def _loading_a_part(self, load: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        try:
            return load(*args, **settings)
        finally:
            if not self._is_backend():
                self._note_load(False)

    def _note_load(self, whole: bool) -> None:
        self._reloaded, self._lost = True, self._lost and not whole
        if self._ours is not None:
            self._ours.loaded(whole=whole)

    def _sleep(self, sleep: Callable[..., Any], level: int = 1) -> Any:
        self._note_sleep({"weights", "kv_cache"}, dropped=level == 2)
        return sleep(level=level)

    def _discard(self, discard: Callable[..., Any], tags: Sequence[str]) -> Any:
        self._note_sleep(tags, dropped="weights" in tags)
        return discard(tags)

    def _wake_up(self, wake: Callable[..., Any], tags: Sequence[str] | None = None) -> Any:
        found = wake(tags)
        self._asleep = frozenset() if tags is None else self._asleep - {*tags}
        if self._ours is not None:
            self._ours.sleeps(self._asleep, dropped=False)
        return found

    def _note_sleep(self, tags: Iterable[str], *, dropped: bool) -> None:
        """Note before the memory goes that ``tags`` sleep, and whether the weights are lost."""
        self._asleep, self._lost = self._asleep | {*tags}, self._lost or dropped
        if self._ours is not None:
            self._ours.sleeps(self._asleep, dropped=dropped)


def _refusing_parts(resume: Callable[[Any], None]) -> Callable[[Any], None]:
    """Keep an engine paused that holds a part of a version, whoever calls ``/resume`` or ``/wake_up``."""

    @functools.wraps(resume)
    def resumed(core: Any) -> None:
        if not all(core.model_executor.collective_rpc(RESUMES)):
            raise partial_version("the engine")
        resume(core)

    return resumed


def _hear_replicas() -> None:
    """Have the client of data-parallel replicas return what all of them answer to our call, not the first alone."""
    from vllm.v1.engine.core_client import AsyncMPClient

    call = AsyncMPClient.collective_rpc_async

    @functools.wraps(call)
    async def of_all(client: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[Any]:
        if method != CALL:
            return await call(client, method, timeout, args, kwargs)
        found = await client.call_utility_all_async("collective_rpc", method, timeout, args, kwargs)
        return [row for rows in found for row in rows]

    AsyncMPClient.collective_rpc_async = of_all


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
