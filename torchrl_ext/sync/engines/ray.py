"""The port of an engine in a Ray actor: what an `EngineActor` or another class holds, or a server.

Ray moves the calls; weights go by the transport, from the trainer to the actor's process or to the engine behind it.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, final

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import (
    ConfigError,
    DeadlineError,
    EngineRefusedError,
    EngineUnreachableError,
    WeightSyncError,
)
from torchrl_ext.messages import Message
from torchrl_ext.registry import Make
from torchrl_ext.rpc.client import EngineClient
from torchrl_ext.rpc.engine import Engine
from torchrl_ext.rpc.pool import Pool
from torchrl_ext.rpc.port import EngineState, Port
from torchrl_ext.sync.engines.actors import EngineActor, Served, answer, as_remote, begin, the_ray
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.types import EngineInfo, Info
from torchrl_ext.weights.source import is_torchrl

__all__ = ["EngineActor", "RayPort", "Served", "as_remote", "connect_actors", "ray_engine"]

_POLL_S = 0.05
_VLLM_TIMEOUT_S = 600.0
_LIMITS = {"timeout_s", "load_timeout_s", "start_timeout_s"}
_SHORT = {"describe", "state", "release", "close"}  # calls that wait for no weights


class _Late(Exception):
    """A call was begun in an actor, and has no answer in time."""


@final
class RayPort(Port):
    """The engine of a Ray actor, whose own port answers there.

    Args:
        actor, pick, timeout_s, load_timeout_s, start_timeout_s: as for `ray_engine`.
    """

    kind: ClassVar[str] = "ray"

    def __init__(
        self,
        actor: Any,
        *,
        pick: Callable[[Any], Any] | None = None,
        timeout_s: float = 60.0,
        load_timeout_s: float = 600.0,
        start_timeout_s: float = 600.0,
    ) -> None:
        ray = the_ray()
        if isinstance(actor, str):
            self.url = f"ray:{actor}"
            try:
                actor = ray.get_actor(actor)
            except ValueError as error:
                raise ConfigError(f"there is no Ray actor called {actor!r}: {error}") from None
        else:
            self.url = "ray:" + str(actor).removeprefix("Actor(").removesuffix(")").replace(", ", "/")
        self._actor, self._pick, self._name = actor, pick, uuid.uuid4().hex
        self.timeout_s, self._timeout_s, self._first_timeout_s = load_timeout_s, timeout_s, start_timeout_s

    def describe(self) -> EngineInfo:
        """See `Port.describe`; ``url`` is the actor's, and `address` has the engine's own."""
        return replace(self._ask("describe"), url=self.url, kind=self.kind)

    def address(self) -> str:
        """Return the URL at which the engine answers requests, when it is a server."""
        return str(self._ask("describe").url)

    def suited(self, info: Info) -> Port:
        found = copy.copy(self)
        self._first_timeout_s = 0.0
        pauses, proves, drops_first = self._call("suited", info)
        vars(found).update(pauses=pauses, proves=proves, drops_first=drops_first)
        return found

    def state(self, *, fit: bool = False) -> EngineState:
        return self._ask("state", fit=fit)

    def tell(self, message: Message) -> list[Info]:
        return self._ask("tell", message)

    def hold(self, before: EngineState) -> None:
        self._ask("hold", before)

    def release(self) -> None:
        self._ask("release")

    def abandon(self) -> None:
        self._ask("abandon")

    def drop_cached(self) -> None:
        self._ask("drop_cached")

    def make_idle(self) -> None:
        self._ask("make_idle")

    def label_as(self, version: int) -> None:
        self._ask("label_as", version)

    def refuse_sleep(self, level: int, tags: frozenset[str]) -> None:
        self._ask("refuse_sleep", level, tags)

    def sleep(self, level: int, tags: frozenset[str] | None, state: EngineState) -> None:
        self._ask("sleep", level, tags, state)

    def wake(self, tags: frozenset[str], state: EngineState) -> None:
        self._ask("wake", tags, state)

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._ask("logprobs", prompts)

    def close(self, connection: str) -> None:
        with suppress(EngineUnreachableError, EngineRefusedError):  # it is gone, or another sender's
            self._ask("close", connection)

    def _ask(self, name: str, *args: Any, **settings: Any) -> Any:
        """Call a method of the port in the actor, and return its answer; raise as `_call`."""
        return self._call("call", name, *args, **settings)

    def _call(self, method: str, *args: Any, **settings: Any) -> Any:
        """Call a method of the `EngineActor`, and wait for its answer.

        Raises:
            EngineUnreachableError: the actor is dead.
            DeadlineError: no answer in time.
            WeightSyncError: what the actor raised, in its own class where it is one of ours.
        """
        ray, what = the_ray(), args[0] if method == "call" else method
        limit = max(self._timeout_s if what in _SHORT else self.timeout_s, self._first_timeout_s)
        try:
            found = self._answer(method, args, settings, limit)
        except ray.exceptions.RayTaskError as error:
            raise self._failed(what, error.cause) from error
        except (ray.exceptions.GetTimeoutError, _Late) as error:
            raise DeadlineError(
                f"no answer to {what!r} within {limit:g} s from {self.url}",
                state="the call may still run in the actor",
                hint="look at the actor's log, or allow more time (load_timeout_s)",
            ) from error
        except ray.exceptions.RayActorError as error:
            raise EngineUnreachableError(
                f"{str(error).strip().rstrip('.')}; {self.url} is dead",
                state="its weights are lost with it",
                hint="start another actor, and connect a client to that",
            ) from error
        self._first_timeout_s = 0.0
        return found

    def _answer(self, method: str, args: tuple[Any, ...], settings: Info, timeout_s: float) -> Any:
        """Return the actor's answer; errors of Ray, and errors that Ray carries, come through."""
        ray, actor = the_ray(), self._actor
        if self._pick is None:
            return ray.get(getattr(actor, method).remote(*args, **settings), timeout=timeout_s)
        within, job = Deadline(timeout_s), uuid.uuid4().hex
        begun = actor.__ray_call__.remote(begin, self._pick, self._name, job, method, args, settings)
        (found,) = ray.get(begun, timeout=timeout_s) or within.poll(
            lambda: ray.get(actor.__ray_call__.remote(answer, self._name, job), timeout=max(_POLL_S, within.left_s)),
            late=_Late,
            longest_s=_POLL_S,
        )
        return found

    def _failed(self, what: str, cause: BaseException) -> WeightSyncError:
        if isinstance(cause, the_ray().exceptions.RaySystemError) and "torchrl_ext" in str(cause):
            return ConfigError(
                f"{str(cause).splitlines()[0]}; {self.url} cannot be driven",
                expected="an actor that can import this package",
                hint="install this package in the environment of the actor",
            )
        if isinstance(cause, WeightSyncError):
            return cause
        return EngineRefusedError(f"{type(cause).__name__}: {cause}; {self.url} did not {what}")


def ray_engine(actor: Any, **settings: Any) -> Engine:
    """Return the client of the engine in an actor.

    Args:
        actor: its handle, or the name that it was given.
        pick: None for an `EngineActor`. For an actor of any other class: called in the actor with its object, returns
            what takes the weights, as ``make`` of `EngineActor` does. It is sent by its name or its code, and the
            actor's environment needs this package.
        timeout_s: deadline of each short call, in seconds.
        load_timeout_s: deadline of joining a transport and of receiving weights, in seconds.
        start_timeout_s: deadline of the first call, which waits for the actor and its engine to start, in seconds.

    Raises:
        ConfigError: ray is not installed, or no actor has this name.
    """
    return Engine(RayPort(actor, **settings))


def connect_actors(engine: Any, **settings: Any) -> EngineClient:
    """Return the client for engines that Ray runs, or that TorchRL made; `make_engine("ray", ...)` calls it.

    Of TorchRL's engines we drive the vLLM inside, whose workers take the weights themselves.

    Args:
        engine: handle or name of an `EngineActor`, TorchRL's `AsyncVLLM`, `RayLLMWorker` or `LocalLLMWrapper`, or a
            sequence of these.
        settings: as for `ray_engine`, without ``pick`` for TorchRL's engines; these take ``pause_mode`` and
            ``keep_cache`` too, as `InProcessEngine` does.

    Raises:
        ConfigError: ray is not installed, or there is no such actor; a setting that the engine does not take; an
            `AsyncVLLM` without replicas; or another implementation of TorchRL's interface, which cannot say whether an
            update reached it whole.
    """
    if isinstance(engine, Sequence) and not isinstance(engine, str):
        return Pool([connect_actors(one, **settings) for one in engine])
    torchrls = is_torchrl(engine, "RLvLLMEngine")
    known = _LIMITS | ({"pause_mode", "keep_cache"} if torchrls else {"pick"})
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise ConfigError(
            f"{'TorchRL' if torchrls else 'Ray'}'s engines take no {', '.join(unknown)}",
            expected=f"of {', '.join(sorted(known))}",
        )
    if not torchrls:
        return ray_engine(engine, **settings)
    limits = {name: settings[name] for name in _LIMITS & settings.keys()}
    vllm = {
        "pause_mode": settings.get("pause_mode") or "keep",
        "keep_cache": settings.get("keep_cache", False),
        "timeout_s": limits.get("load_timeout_s", limits.get("timeout_s", _VLLM_TIMEOUT_S)),
    }
    if is_torchrl(engine, "LocalLLMWrapper"):
        return InProcessEngine(engine, url=f"{type(engine).__name__}-{id(engine):x}", **vllm)
    if is_torchrl(engine, "RayLLMWorker"):
        return ray_engine(engine.ray_actor, pick=partial(InProcessEngine, **vllm), **limits)
    if not is_torchrl(engine, "AsyncVLLM"):
        raise ConfigError(
            f"{type(engine).__name__} implements RLvLLMEngine, whose update_weights cannot tell an update that ends "
            "early from a whole one",
            expected="TorchRL's AsyncVLLM, RayLLMWorker or LocalLLMWrapper",
            hint="give make_engine('inprocess', engine=...) the vLLM, the module or the tensors inside",
        )
    if not engine.actors:
        raise ConfigError("this AsyncVLLM has no replicas", hint="make it by AsyncVLLM.launch or from_pretrained")
    return Pool([ray_engine(actor, pick=partial(_async_llm, **vllm), **limits) for actor in engine.actors])


def _async_llm(replica: Any, **settings: Any) -> InProcessEngine:
    """Return the client of the `AsyncLLM` in a replica of `AsyncVLLM`; it is called in the replica's actor."""
    return InProcessEngine(replica.engine, **settings)


RAY = Make(client=connect_actors)
