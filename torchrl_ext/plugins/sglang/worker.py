"""What our messages do inside one worker of an SGLang server.

A message is one JSON object; SGLang hands it to every worker at the same point of its loop, in the thread that
generates (`torchrl_ext.plugins.sglang.register`):

====================================  ====================================================================
``{"hello": true}``                   is the plugin there? Answer: ``{"torchrl_ext": version, "workers": n}``
``{"inspect": question}``             `torchrl_ext.sync.inspection.inspect`. Answer: ``{"answer": {...}}``
``{"connect": info}``                 check the parameters, then join the transport of `Transport.open`'s info
``{"prefetch": version}``             stage a version while the server generates
``{"rehearse": question}``            `WeightReceiver.rehearse`. Answer: what it returns
``{"poll": true}``                    is what `connect` or `prefetch` began over? Answer: ``{"working": bool}``
``{"flush": true}``                   drop cached keys and values. Answer: ``{"flushed": bool}``, false while requests
                                      hold on to them
``{"rest": true}``                    Answer: ``{"paused": bool, "asleep": [tags], "hollow": bool}``
``{"hollow": true}``                  the weights are about to be given up in a sleep: only a whole update fills them
``{"start": true, "session": bool}``  the server is paused: make ready to load; is SGLang's own bracket open?
``{"load": info}``                    receive one handoff, or ``{"verify": digests}``
``{"seal": version, "label": text}``  everything arrived; requests are labelled from here on
====================================  ====================================================================

What waits for others (joining, staging) runs in a thread of its own, so that the server goes on generating, and a
trainer that never comes blocks nobody. Workers agree after each step; where any of them failed, all answer with the
words of all.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any, Protocol

import torch
from torch import distributed, nn

import torchrl_ext
from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, NotConnectedError
from torchrl_ext.plugins.common.published_path import locate, parameters
from torchrl_ext.plugins.common.workers import agree, joined
from torchrl_ext.plugins.sglang.loader import SGLangLoader
from torchrl_ext.stores import open_store
from torchrl_ext.sync.inspection import inspect
from torchrl_ext.sync.receiver import WeightReceiver
from torchrl_ext.transports.shared_root import SharedRoot
from torchrl_ext.types import STILL_STAGING, Info, ParamMeta, least

__all__ = ["SGLangWorker"]

log = logging.getLogger("torchrl_ext")

_SETTLE_TIMEOUT_S = 120.0


class Scheduler(Protocol):
    """What a worker's messages use of SGLang (`SchedulerWeightUpdaterManager`)."""

    scheduler: Any
    offload_tags: set[str]

    def flush_cache(self, *, empty_cache: bool) -> bool:
        """Drop cached keys and values, unless requests hold on to them; with ``empty_cache`` free memory as well."""

    def record_weight_version_after_update(self, weight_version: str) -> None:
        """Label what is generated from here on."""


class SGLangWorker:
    """A `WeightReceiver` for one worker's model, driven by messages.

    Args:
        model: the worker's model.
        checkpoint: the directory that it was loaded from.
        group: the tensor-parallel workers of this server, on the CPU.
        **settings: of `SGLangLoader`.
    """

    def __init__(self, model: nn.Module, checkpoint: str, group: distributed.ProcessGroup, **settings: Any) -> None:
        self._group, self._checkpoint = group, checkpoint
        self._loader = SGLangLoader(model, checkpoint, group, **settings)
        self._receiver = WeightReceiver(self._loader, rank=distributed.get_rank(group))
        self._job: Future[None] | None = None
        self._settled = False  # what was begun last came to a good end
        self._after: Callable[[], None] = lambda: None
        self._joined: tuple[str, Any] | None = None
        self._hollow = False  # the weights were given up, and no update has filled them since

    @torch.inference_mode()
    def answer(self, text: str, scheduler: Scheduler) -> tuple[bool, str]:
        """Do what a message says; returns whether that went well, and the answer. Never raises."""
        try:
            return True, json.dumps(self._answer(json.loads(text), scheduler))
        except Exception as error:  # noqa: BLE001 - told to the caller, whatever it is
            return False, _words(error)

    @torch.inference_mode()
    def land(self, path: str) -> tuple[bool, str]:
        """Bring the model to the version at ``path``, as slime's ``load_format="delta"`` wants it. Never raises.

        Args:
            path: a version directory ``weight_v000007``, or the root that holds it (then the newest version is taken).
        """
        try:
            return True, self._land(path)
        except Exception as error:  # noqa: BLE001 - as for `answer`
            self._joined = None
            return False, _words(error)

    def doubt(self) -> None:
        """SGLang loaded the model by itself: the next version does not build on what it holds."""
        self._loader.reloaded()
        self._receiver.doubt()
        self._hollow = False

    def _answer(self, message: Info, scheduler: Scheduler) -> Info:
        if "inspect" in message:
            return {"answer": {"worker": distributed.get_rank(self._group), **inspect(message["inspect"])}}
        if "hello" in message:
            return {"torchrl_ext": torchrl_ext.__version__, "workers": distributed.get_world_size(self._group)}
        if "connect" in message:
            self._joined = None
            self._together(lambda: self._check(message["connect"]))
            self._begin(lambda: self._receiver.connect(message["connect"]))
        elif "prefetch" in message:
            self._begin(lambda: self._receiver.prefetch(message["prefetch"]), after=self._receiver.confirm)
        elif "rehearse" in message:
            return self._rehearse(message["rehearse"])
        elif "poll" in message:
            return {"working": self._poll()}
        elif "rest" in message:
            paused = bool(getattr(scheduler.scheduler, "_engine_paused", False))
            asleep = sorted(getattr(scheduler, "offload_tags", ()))
            return {"paused": paused, "asleep": asleep, "hollow": self._hollow}
        elif "hollow" in message:
            self._together(self._stop)
            self.doubt()
            self._hollow = True
        elif "flush" in message:
            return {"flushed": bool(scheduler.flush_cache(empty_cache=False))}
        elif "start" in message:
            self._together(lambda: self._start(bool(message.get("session"))))
        elif "load" in message:
            self._together(lambda: self._receiver.load(message["load"]), on_failure=self._receiver.abort)
        elif "seal" in message:
            self._together(lambda: self._seal(message["seal"]))
            scheduler.record_weight_version_after_update(str(message["label"]))
        else:
            raise ConfigError(f"the plugin knows no message with {', '.join(sorted(message)) or 'nothing in it'}")
        return {}

    def _check(self, info: Info) -> None:
        """Everything that can be known before a transport is joined, or a weight touched."""
        self._stop()
        if "transport" not in info or "params" not in info:
            raise ConfigError("the call names no transport and parameters", expected="the info of Transport.open")
        first, size = info.get("rank_offset", 1), info.get("world_size")
        workers = distributed.get_world_size(self._group)
        if size is not None and not 1 <= first <= size - workers:
            raise ConfigError(
                f"this engine's {workers} workers from rank {first} on do not fit into a world of {size}",
                expected="a world size of 1 (the trainer) + the workers of all engines, as GET /server_info counts",
                state="nothing was joined",
            )
        self._loader.check(tuple(ParamMeta.from_json(row) for row in info["params"]))

    def _start(self, session: bool = False) -> None:
        """Args: session: SGLang's own bracket around a load is open (`/begin_weight_update`)."""
        self._stop()
        self._loader.prepared = session
        self._receiver.start()

    def _rehearse(self, question: Info) -> Info:
        """Try the road of an update; every worker for itself, on its own part of the model."""
        found: Info = {}
        self._together(self._stop)
        self._together(lambda: found.update(self._receiver.rehearse(question)))
        told = [json.loads(words) for words in agree(json.dumps([found["needed"], found["proof"]]), self._group)]
        return {**found, "needed": any(row[0] for row in told), "proof": least(row[1] for row in told)}

    def _seal(self, version: int) -> None:
        self._receiver.load({"seal": version})
        self._receiver.finish(version)
        self._hollow = False

    def _begin(self, work: Callable[[], None], after: Callable[[], None] = lambda: None) -> None:
        """Start ``work`` in a thread of its own; ``after`` follows in this one, on all workers together."""
        self._together(self._stop)
        job: Future[None] = Future()
        self._job, self._after, self._settled = job, after, False
        Thread(target=_resolve, args=(job, work), name="torchrl_ext", daemon=True).start()

    def _poll(self) -> bool:
        """Whether any worker is still at it.

        Raises:
            EngineError: it failed on a worker.
        """
        job = self._job
        if job is None and self._settled:
            return False  # another replica of a data-parallel server is still at it, and all are asked
        if job is None:
            raise NotConnectedError("nothing was begun", hint="connect or prefetch first")
        error = job.exception() if job.done() else EngineError(STILL_STAGING)
        told = agree("" if error is None else _words(error), self._group)
        failures = ["" if words == _words(EngineError(STILL_STAGING)) else words for words in told]
        if any(failures):
            self._receiver.abort()  # others may wait for those that failed
            self._log(error)
            raise EngineError(joined(failures))
        if any(told):
            return True
        self._job = None
        self._together(self._after)
        self._settled = True
        return False

    def _stop(self) -> None:
        """No thread of ours works behind this line."""
        job, self._job = self._job, None
        if job is not None and not job.done():
            self._receiver.abort()
            if not wait([job], _SETTLE_TIMEOUT_S).done:
                raise DeadlineError(f"staging did not end within {_SETTLE_TIMEOUT_S:g} s", hint="restart the engine")

    def _together(self, step: Callable[[], Any], *, on_failure: Callable[[], None] = lambda: None) -> None:
        """Run ``step`` on every worker of this server.

        Raises:
            EngineError: on every worker, when it failed on any.
        """
        words = ""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other workers wait to hear of it
            words = _words(error)
            self._log(error)
            on_failure()
        failures = agree(words, self._group)
        if any(failures):
            raise EngineError(joined(failures))

    def _log(self, error: BaseException | None) -> None:
        if error is not None and STILL_STAGING not in str(error):
            log.error("weight update failed on worker %d", distributed.get_rank(self._group), exc_info=error)

    def _land(self, path: str) -> str:
        found: dict[str, Any] = {}

        def look() -> None:
            self._stop()
            found["root"], found["version"] = locate(path)
            found["params"] = parameters(found["root"], found["version"], self._checkpoint)

        def join() -> None:
            probe = SharedRoot(open_store(root), f"reader-{distributed.get_rank(self._group)}")
            try:
                info = {"transport": "delta", "base": self._checkpoint, "needs_base": False, "params": params}
                self._receiver.connect({**info, **probe.invite()})
            finally:
                probe.clear()

        def commit() -> None:
            self._start()
            self._receiver.load({"transport": "delta", "version": version, "params": params, "seal": version})
            self._receiver.finish(version)
            self._hollow = False

        self._together(look)
        root, version, params = found["root"], found["version"], found["params"]
        if self._joined != (root, params):
            self._together(join)
            self._joined = (root, params)
        self._together(lambda: self._receiver.prefetch(version))
        self._together(self._receiver.confirm)
        self._together(commit)
        return f"version {version} of {root} is in service"


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"


@torch.inference_mode()
def _resolve(job: Future[None], work: Callable[[], None]) -> None:
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - carried over to the thread that asks
        job.set_exception(error)
    else:
        job.set_result(None)
