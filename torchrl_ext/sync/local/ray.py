"""Engines in Ray actors: a `RayPort` sends functions to an actor, which call the engine's port there.

Ray carries only calls; the transport moves weights directly to the actor's process or to the engine behind it.
"""

from __future__ import annotations

import inspect
import operator
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial, partialmethod
from typing import Any, ClassVar, final

from torchrl_ext.base.deadline import Deadline, in_thread
from torchrl_ext.base.errors import (
    ConfigError,
    DeadlineError,
    EngineRefusedError,
    EngineUnreachableError,
    WeightSyncError,
    why,
)
from torchrl_ext.base.messages import Leave, Message
from torchrl_ext.base.registry import Make
from torchrl_ext.base.types import EngineInfo, Info, is_torchrl
from torchrl_ext.control.client import EngineClient
from torchrl_ext.control.engine import Engine
from torchrl_ext.control.fleet import Fleet
from torchrl_ext.control.port import Port
from torchrl_ext.sync.local.inprocess import InProcessEngine

__all__ = ["RayPort", "ray_engine"]

_POLL_S = 0.05
_SHORT = {"describe", "paused", "state", "resume"}  # calls that do not wait for weights

_ports: dict[str, Port] = {}  # by client, in an actor
_jobs: dict[str, Future[Any]] = {}  # calls that a thread of an actor does


def begin(held: Any, open_port: Callable[[Any], Port], client: str, job: str, call: Callable[[Any], Any]) -> Any:
    """Call a method of an engine's port in an actor, and return its answer in a tuple; None if a thread has begun it.

    Ray starts no other call of the actor before this one returns. In an actor with coroutines, which run meanwhile, a
    thread does the call; any other actor does it directly.

    Args:
        held: the actor's object.
        open_port: takes it; returns the engine's port.
        client: id of the client, which has a port of its own.
        job: id of this call, for `answer`.
        call: takes the port.
    """
    if client not in _ports:
        _ports[client] = open_port(held)
    if not inspect.getmembers(type(held), inspect.iscoroutinefunction):
        return (call(_ports[client]),)
    _jobs[job] = in_thread(partial(call, _ports[client]), "torchrl-ext-ray")
    return None


def answer(held: Any, job: str) -> tuple[Any] | None:
    """Return the answer to a job in a tuple, or None while it runs; raise the job's error."""
    return (_jobs.pop(job).result(),) if _jobs[job].done() else None


def _open(held: Any, pick: Callable[[Any], Any] | None, **settings: Any) -> Port:
    return InProcessEngine(held if pick is None else pick(held), **settings).port


def _the_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"ray cannot be imported: {error}", hint="pip install 'torchrl_ext[ray]'") from error
    return ray


@final
class RayPort(Port):
    """Calls the port of an engine in a Ray actor.

    Args:
        actor: its handle.
        pick, timeout_s, load_timeout_s: as for `ray_engine`; ``pick`` is None if the actor's object is the engine.
        settings: further ones of the `InProcessEngine` in the actor.
    """

    kind: ClassVar[str] = "ray"

    def __init__(
        self, actor: Any, *, pick: Callable[[Any], Any] | None, timeout_s: float, load_timeout_s: float, **settings: Any
    ) -> None:
        _the_ray()
        self.url = "ray:" + str(actor).removeprefix("Actor(").removesuffix(")").replace(", ", "/")
        self._actor, self._name = actor, uuid.uuid4().hex
        self._open = partial(_open, pick=pick, timeout_s=load_timeout_s, **settings)
        self.timeout_s, self._short_s, self._started = load_timeout_s, timeout_s, False

    def describe(self) -> EngineInfo:
        """See `Port.describe`; ``url`` is the actor's."""
        return replace(self._ask("describe"), url=self.url, kind=self.kind)

    def _ask(self, name: str, *args: Any, **settings: Any) -> Any:
        """Call a method of the port in the actor, and wait for its answer; our own errors keep their class."""
        ray, send, job = _the_ray(), self._actor.__ray_call__.remote, uuid.uuid4().hex
        within = Deadline(self._short_s if self._started and name in _SHORT else self.timeout_s)
        try:
            call = operator.methodcaller(name, *args, **settings)
            found = ray.get(send(begin, self._open, self._name, job, call), timeout=within.timeout_s)
            (found,) = found or within.poll(
                lambda: ray.get(send(answer, job), timeout=max(_POLL_S, within.left_s)),
                late=ray.exceptions.GetTimeoutError,
                longest_s=_POLL_S,
            )
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, WeightSyncError):
                raise cause from error
            missing = isinstance(cause, ray.exceptions.RaySystemError) and "torchrl_ext" in str(cause)
            hint = "install this package in the environment of the actor" if missing else None
            raise EngineRefusedError(f"{why(cause)}; {self.url} did not {name}", hint=hint) from error
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineError(
                f"no answer to {name!r} within {within.timeout_s:g} s from {self.url}",
                state="the call may still run in the actor",
                hint="read the actor's log, or raise load_timeout_s",
            ) from error
        except ray.exceptions.RayActorError as error:
            raise EngineUnreachableError(
                f"{str(error).strip().rstrip('.')}; {self.url} is dead",
                state="its weights are lost with it",
                hint="start another actor and connect to it",
            ) from error
        self._started = True
        return found

    paused: Any = partialmethod(_ask, "paused")
    state: Any = partialmethod(_ask, "state")
    pause: Any = partialmethod(_ask, "pause")
    resume: Any = partialmethod(_ask, "resume")
    sleep: Any = partialmethod(_ask, "sleep")
    wake: Any = partialmethod(_ask, "wake")
    logprobs: Any = partialmethod(_ask, "logprobs")

    def call(self, message: Message) -> list[Info]:
        if not isinstance(message, Leave):
            return self._ask("call", message)
        with suppress(EngineUnreachableError, EngineRefusedError):  # the engine is gone, or has another sender
            return self._ask("call", message)
        return []


def ray_engine(
    engine: Any,
    *,
    pick: Callable[[Any], Any] = operator.attrgetter("engine"),
    pause_mode: str = "keep",
    keep_cache: bool = False,
    timeout_s: float = 60.0,
    load_timeout_s: float = 600.0,
) -> EngineClient:
    """Return the client of engines in Ray actors or of TorchRL's engines; `make_engine("ray", ...)` calls it.

    The client drives the vLLM inside TorchRL's engines, whose workers receive the weights directly.

    Args:
        engine: an actor's handle, TorchRL's `AsyncVLLM`, `RayLLMWorker` or `LocalLLMWrapper`, or a list of these.
        pick: called in the actor with its object; returns what `InProcessEngine` drives, such as a module or a
            `WeightReceiver`. Ray pickles it by reference or by value, and the actor's environment needs this package.
        pause_mode, keep_cache: as for `InProcessEngine`.
        timeout_s: deadline of each short call, in seconds.
        load_timeout_s: deadline of joining a transport, of receiving weights, and of the first call, which waits for
            the actor and its engine to start, in seconds.

    Raises:
        ConfigError: ray is not installed; an `AsyncVLLM` has no replicas; or the engine is another implementation of
            TorchRL's interface, which cannot report whether an update is complete.
    """
    how: dict[str, Any] = {"pause_mode": pause_mode, "keep_cache": keep_cache}
    settings: dict[str, Any] = {"pick": pick, "timeout_s": timeout_s, "load_timeout_s": load_timeout_s, **how}
    if is_torchrl(engine, "AsyncVLLM"):
        engine = list(engine.actors)
        if not engine:
            hint = "create it with AsyncVLLM.launch or AsyncVLLM.from_pretrained"
            raise ConfigError("this AsyncVLLM has no replicas", hint=hint)
    if isinstance(engine, (list, tuple)):
        return Fleet([ray_engine(one, **settings) for one in engine])
    if is_torchrl(engine, "LocalLLMWrapper"):
        return InProcessEngine(engine, url=f"{type(engine).__name__}-{id(engine):x}", timeout_s=load_timeout_s, **how)
    if is_torchrl(engine, "RayLLMWorker"):
        return Engine.of(RayPort(engine.ray_actor, **{**settings, "pick": None}))
    if is_torchrl(engine, "RLvLLMEngine"):
        raise ConfigError(
            f"{type(engine).__name__} implements RLvLLMEngine, whose update_weights cannot tell an incomplete update "
            "from a complete one",
            expected="TorchRL's AsyncVLLM, RayLLMWorker or LocalLLMWrapper",
            hint="give make_engine('inprocess', engine=...) the vLLM, the module or the tensors inside",
        )
    return Engine.of(RayPort(engine, **settings))


RAY = Make(client=ray_engine)
