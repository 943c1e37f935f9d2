"""`RayEngine` drives an engine that lies in a Ray actor: what an `EngineActor` or another class holds, or a server.

Ray moves the calls; weights go by the transport, from the trainer to the actor's process or to the engine behind it.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
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
from torchrl_ext.rpc.client import EngineClient, _nothing
from torchrl_ext.rpc.fleet import Fleet
from torchrl_ext.sync.engines.actors import EngineActor, Served, answer, as_remote, begin, the_ray
from torchrl_ext.types import EngineInfo, EngineRow, Info, Part
from torchrl_ext.weights.source import is_torchrl

__all__ = ["EngineActor", "RayEngine", "Served", "as_remote", "connect_actors"]

log = logging.getLogger("torchrl_ext")

_POLL_S = 0.05


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
        self._verifies = True
        self._row = EngineRow(engine=self._url, kind=self.kind, state="serving")

    @property
    def url(self) -> str:
        return self._url

    @property
    def verifies(self) -> bool:
        return self._verifies

    def address(self) -> str:
        """Return the URL at which the engine answers requests, when it is a server."""
        return self._ask("info").url

    def info(self) -> EngineInfo:
        return replace(self._ask("info"), url=self._url, kind=self.kind)

    def connect(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        self._verifies = self._ask("connect", info, timeout_s=self._load_timeout_s)

    def replaced(self, connection: str) -> str:
        try:
            return str(self._ask("replaced", connection))
        except (EngineError, DeadlineError):
            return ""

    @property
    def proof(self) -> str:
        return self._row.proof

    def rehearse(self, how: str = "once") -> None:
        self._row = replace(self._row, proof=self._ask("rehearse", how, timeout_s=self._load_timeout_s))

    def prefetch(self, version: int, part: Part | None = None) -> None:
        self._ask("prefetch", version, part, timeout_s=self._load_timeout_s)

    def begin(self, version: int) -> None:
        self._row = replace(self._row, state="paused")
        self._ask("begin", version, timeout_s=self._load_timeout_s)

    def load(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        self._ask("load", info, timeout_s=self._load_timeout_s)

    def _compare(self, digests: Mapping[str, str]) -> None:
        self._ask("verify", digests, timeout_s=self._load_timeout_s)

    def commit(self, version: int) -> None:
        self._ask("commit", version, timeout_s=self._load_timeout_s)
        self._row = replace(self._ask("row"), engine=self._url, kind=self.kind)

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._ask("logprobs", prompts, timeout_s=self._load_timeout_s)

    def pause(self) -> bool:
        self._row = replace(self._row, state="paused")  # until the actor says otherwise
        return bool(self._ask("pause", timeout_s=self._load_timeout_s))

    def resume(self) -> None:
        self._ask("resume")
        self._row = replace(self._row, state="serving", error=None)

    def sleep(self, level: int = 1, tags: Collection[str] | None = None) -> None:
        self._row = replace(self._row, state="paused")
        self._ask("sleep", level, tags, timeout_s=self._load_timeout_s)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        self._ask("wake_up", tags, timeout_s=self._load_timeout_s)
        self._row = replace(self._ask("row"), engine=self._url, kind=self.kind)

    def rows(self) -> tuple[EngineRow, ...]:
        return (self._row,)

    def close(self) -> None:
        with suppress(EngineUnreachableError):
            self._ask("close")

    def _ask(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call the actor, and wait for the answer.

        Raises:
            EngineUnreachableError: the actor is dead.
            DeadlineError: no answer in time.
            WeightSyncError: what the actor raised, in its own class where it is one of ours.
        """
        ray = the_ray()
        limit = max(timeout_s or self._timeout_s, self._first_timeout_s)
        try:
            found = self._call(method, args, limit)
        except ray.exceptions.RayTaskError as error:
            raise self._failed(method, error.cause) from error
        except (ray.exceptions.GetTimeoutError, _Late) as error:
            raise self._noted(
                DeadlineError(
                    f"{self._url} did not answer {method!r} within {limit:g} s",
                    state="the call may still run in the actor",
                    hint="look at the actor's log, or allow more time (load_timeout_s)",
                )
            ) from error
        except ray.exceptions.RayActorError as error:
            failure = EngineUnreachableError(
                f"{self._url} is dead: {str(error).strip()}",
                state="its weights are lost with it",
                hint="start another actor, and connect a client to that",
            )
            self._row = replace(self._row, state="unreachable", error=str(failure))
            raise failure from error
        self._first_timeout_s = 0.0
        return found

    def _call(self, method: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        """Return the actor's answer; what Ray raises, and what it carries, comes through."""
        ray, actor = the_ray(), self._actor
        if self._pick is None:
            return ray.get(getattr(actor, method).remote(*args), timeout=timeout_s)
        within, job = Deadline(timeout_s), uuid.uuid4().hex
        begun = actor.__ray_call__.remote(begin, self._pick, self._name, job, method, *args)
        told = answer, self._name, job
        found = ray.get(begun, timeout=timeout_s) or within.poll(
            lambda: ray.get(actor.__ray_call__.remote(*told), timeout=max(_POLL_S, within.left_s)),
            late=_Late,
            longest_s=_POLL_S,
        )
        return found[0]

    def _failed(self, method: str, cause: BaseException) -> WeightSyncError:
        ray = the_ray()
        if isinstance(cause, ray.exceptions.RaySystemError) and "torchrl_ext" in str(cause):
            return ConfigError(
                f"{self._url} cannot be driven: {str(cause).splitlines()[0]}",
                expected="an actor that can import this package",
                hint="install this package in the environment of the actor",
            )
        try:  # the client in the actor knows the engine's state now
            row = self._call("row", (), self._timeout_s)
            self._row = replace(row, engine=self._url, kind=self.kind)
        except (ray.exceptions.RayError, _Late) as error:
            log.warning("%s does not say how its engine is: %s", self._url, error)
        if isinstance(cause, WeightSyncError):
            return self._noted(cause)
        return self._noted(EngineRefusedError(f"{self._url} failed to {method}: {type(cause).__name__}: {cause}"))

    def _noted(self, error: WeightSyncError) -> WeightSyncError:
        self._row = replace(self._row, error=str(error))
        return error


def connect_actors(engine: Any, **settings: Any) -> EngineClient:
    """Return the client for engines that Ray runs; `make_engine("ray", ...)` calls it.

    Args:
        engine: handle or name of an `EngineActor`, a sequence of these, or TorchRL's `AsyncVLLM`, `RayLLMWorker` or
            `LocalLLMWrapper`.
        settings: as for `RayEngine`; for TorchRL's engines as for `torchrl_ext.sync.engines.rlvllm.connect_torchrls`.

    Raises:
        ConfigError: ray is not installed, or there is no such actor; or a setting that the engine does not take.
    """
    if isinstance(engine, Sequence) and not isinstance(engine, str):
        return Fleet([RayEngine(actor, **settings) for actor in engine])
    if is_torchrl(engine, "RLvLLMEngine"):
        from torchrl_ext.sync.engines.rlvllm import connect_torchrls

        return connect_torchrls(engine, **settings)
    return RayEngine(engine, **settings)
