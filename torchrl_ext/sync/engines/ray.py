"""`RayEngine` drives an engine that lies in a Ray actor: what an `EngineActor` or another class holds, or a server.

Ray moves the calls; weights go by the transport, from the trainer to the actor's process or to the engine behind it.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    EngineRefusedError,
    EngineUnreachableError,
    WeightSyncError,
)
from torchrl_ext.registry import Make
from torchrl_ext.rpc.client import EngineClient, _nothing
from torchrl_ext.rpc.fleet import Fleet
from torchrl_ext.sync.engines.actors import Answer, EngineActor, Served, answer, as_remote, begin, the_ray
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.types import EngineInfo, EngineRow, Info, Part
from torchrl_ext.weights.source import is_torchrl

__all__ = ["EngineActor", "RayEngine", "Served", "as_remote", "connect_actors"]

log = logging.getLogger("torchrl_ext")

_POLL_S = 0.05
_VLLM_TIMEOUT_S = 600.0
_LIMITS = {"timeout_s", "load_timeout_s", "start_timeout_s"}
_SHORT = {"info", "replaced", "resume", "close"}  # methods that wait for no weights
_PAUSING = {"begin", "pause", "sleep"}


class _Late(Exception):
    """A call was begun in an actor, and has no answer in time."""


class RayEngine(EngineClient):
    """Drives the engine of an actor through its handle.

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
            self._url = f"ray:{actor}"
            try:
                actor = ray.get_actor(actor)
            except ValueError as error:
                raise ConfigError(f"there is no Ray actor called {actor!r}: {error}") from None
        else:
            self._url = "ray:" + str(actor).removeprefix("Actor(").removesuffix(")").replace(", ", "/")
        self._actor, self._pick, self._name = actor, pick, uuid.uuid4().hex
        self._timeout_s, self._load_timeout_s, self._first_timeout_s = timeout_s, load_timeout_s, start_timeout_s
        self._verifies, self._connection = True, ""
        self._row = EngineRow(engine=self._url, kind=self.kind, state="serving")

    @property
    def url(self) -> str:
        return self._url

    @property
    def verifies(self) -> bool:
        return self._verifies

    @property
    def proof(self) -> str:
        return self._row.proof

    def address(self) -> str:
        """Return the URL at which the engine answers requests, when it is a server."""
        return self._ask("info").url

    def info(self) -> EngineInfo:
        return replace(self._ask("info"), url=self._url, kind=self.kind)

    def connect(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        self._connection = str(info.get("connection", ""))
        self._ask("connect", info)

    def replaced(self, connection: str) -> str:
        try:
            return str(self._ask("replaced", connection))
        except (EngineError, DeadlineError):
            return ""

    def rehearse(self, how: str = "once") -> None:
        self._ask("rehearse", how)

    def prefetch(self, version: int, part: Part | None = None) -> None:
        self._ask("prefetch", version, part)

    def begin(self, version: int) -> None:
        self._ask("begin", version)

    def load(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        self._ask("load", info)

    def _compare(self, digests: Mapping[str, str]) -> None:
        self._ask("verify", digests)

    def commit(self, version: int) -> None:
        self._ask("commit", version)

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._ask("logprobs", prompts)

    def pause(self) -> bool:
        return bool(self._ask("pause"))

    def resume(self) -> None:
        self._ask("resume")

    def sleep(self, level: int = 1, tags: Collection[str] | None = None) -> None:
        self._ask("sleep", level, tags)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        self._ask("wake_up", tags)

    def rows(self) -> tuple[EngineRow, ...]:
        return (self._row,)

    def close(self) -> None:
        with suppress(EngineUnreachableError, EngineRefusedError):  # it is gone, or another sender's
            self._ask("close")

    def _ask(self, name: str, *args: Any) -> Any:
        """Call a method of the client in the actor, and wait for its answer.

        Raises:
            EngineUnreachableError: the actor is dead.
            DeadlineError: no answer in time.
            WeightSyncError: what the actor raised, in its own class where it is one of ours.
        """
        ray = the_ray()
        limit = max(self._timeout_s if name in _SHORT else self._load_timeout_s, self._first_timeout_s)
        if name in _PAUSING:
            self._row = replace(self._row, state="paused")  # until the actor says otherwise
        try:
            found, row, self._verifies = self._call(name, args, limit)
        except ray.exceptions.RayTaskError as error:
            raise self._failed(name, error.cause) from error
        except (ray.exceptions.GetTimeoutError, _Late) as error:
            raise self._noted(
                DeadlineError(
                    f"no answer to {name!r} within {limit:g} s from {self._url}",
                    state="the call may still run in the actor",
                    hint="look at the actor's log, or allow more time (load_timeout_s)",
                )
            ) from error
        except ray.exceptions.RayActorError as error:
            self._row = replace(self._row, state="unreachable")
            raise self._noted(
                EngineUnreachableError(
                    f"{str(error).strip().rstrip('.')}; {self._url} is dead",
                    state="its weights are lost with it",
                    hint="start another actor, and connect a client to that",
                )
            ) from error
        self._first_timeout_s = 0.0
        self._row = replace(row, engine=self._url, kind=self.kind)
        return found

    def _call(self, name: str, args: tuple[Any, ...], timeout_s: float) -> Answer:
        """Return the actor's answer; errors of Ray, and errors that Ray carries, come through."""
        ray, actor = the_ray(), self._actor
        if self._pick is None:
            return ray.get(actor.call.remote(self._connection, name, *args), timeout=timeout_s)
        within, job = Deadline(timeout_s), uuid.uuid4().hex
        begun = actor.__ray_call__.remote(begin, self._pick, self._name, job, self._connection, name, *args)
        return ray.get(begun, timeout=timeout_s) or within.poll(
            lambda: ray.get(actor.__ray_call__.remote(answer, self._name, job), timeout=max(_POLL_S, within.left_s)),
            late=_Late,
            longest_s=_POLL_S,
        )

    def _failed(self, name: str, cause: BaseException) -> WeightSyncError:
        ray = the_ray()
        if isinstance(cause, ray.exceptions.RaySystemError) and "torchrl_ext" in str(cause):
            return ConfigError(
                f"{str(cause).splitlines()[0]}; {self._url} cannot be driven",
                expected="an actor that can import this package",
                hint="install this package in the environment of the actor",
            )
        try:  # the client in the actor knows the engine's state now
            row = self._call("rows", (), self._timeout_s)[1]
            self._row = replace(row, engine=self._url, kind=self.kind)
        except (ray.exceptions.RayError, _Late) as error:
            log.warning("%s does not say how its engine is: %s", self._url, error)
        if isinstance(cause, WeightSyncError):
            return self._noted(cause)
        return self._noted(EngineRefusedError(f"{type(cause).__name__}: {cause}; {self._url} did not {name}"))

    def _noted(self, error: WeightSyncError) -> WeightSyncError:
        self._row = replace(self._row, error=str(error))
        return error


def connect_actors(engine: Any, **settings: Any) -> EngineClient:
    """Return the client for engines that Ray runs, or that TorchRL made; `make_engine("ray", ...)` calls it.

    Of TorchRL's engines we drive the vLLM inside, whose workers take the weights themselves.

    Args:
        engine: handle or name of an `EngineActor`, TorchRL's `AsyncVLLM`, `RayLLMWorker` or `LocalLLMWrapper`, or a
            sequence of these.
        settings: as for `RayEngine`, without ``pick`` for TorchRL's engines; these take ``pause_mode`` and
            ``keep_cache`` too, as `InProcessEngine` does.

    Raises:
        ConfigError: ray is not installed, or there is no such actor; a setting that the engine does not take; an
            `AsyncVLLM` without replicas; or another implementation of TorchRL's interface, which cannot say whether an
            update reached it whole.
    """
    if isinstance(engine, Sequence) and not isinstance(engine, str):
        return Fleet([connect_actors(one, **settings) for one in engine])
    torchrls = is_torchrl(engine, "RLvLLMEngine")
    known = _LIMITS | ({"pause_mode", "keep_cache"} if torchrls else {"pick"})
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise ConfigError(
            f"{'TorchRL' if torchrls else 'Ray'}'s engines take no {', '.join(unknown)}",
            expected=f"of {', '.join(sorted(known))}",
        )
    if not torchrls:
        return RayEngine(engine, **settings)
    limits = {name: settings[name] for name in _LIMITS & settings.keys()}
    vllm = {
        "pause_mode": settings.get("pause_mode") or "keep",
        "keep_cache": settings.get("keep_cache", False),
        "timeout_s": limits.get("load_timeout_s", limits.get("timeout_s", _VLLM_TIMEOUT_S)),
    }
    if is_torchrl(engine, "LocalLLMWrapper"):
        return InProcessEngine(engine, url=f"{type(engine).__name__}-{id(engine):x}", **vllm)
    if is_torchrl(engine, "RayLLMWorker"):
        return RayEngine(engine.ray_actor, pick=partial(InProcessEngine, **vllm), **limits)
    if not is_torchrl(engine, "AsyncVLLM"):
        raise ConfigError(
            f"{type(engine).__name__} implements RLvLLMEngine, whose update_weights cannot tell an update that ends "
            "early from a whole one",
            expected="TorchRL's AsyncVLLM, RayLLMWorker or LocalLLMWrapper",
            hint="give make_engine('inprocess', engine=...) the vLLM, the module or the tensors inside",
        )
    if not engine.actors:
        raise ConfigError("this AsyncVLLM has no replicas", hint="make it by AsyncVLLM.launch or from_pretrained")
    return Fleet([RayEngine(actor, pick=partial(_async_llm, **vllm), **limits) for actor in engine.actors])


def _async_llm(replica: Any, **settings: Any) -> InProcessEngine:
    """Return the client of the `AsyncLLM` in a replica of `AsyncVLLM`; it is called in the replica's actor."""
    return InProcessEngine(replica.engine, **settings)


RAY = Make(client=connect_actors)
