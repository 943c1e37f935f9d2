"""Engines in Ray actors: an `EngineActor` hosts an engine and its port, and a `RayPort` calls that port remotely.

Ray carries only calls; the transport moves weights directly to the actor's process or to the engine behind it.
"""

from __future__ import annotations

import copy
import inspect
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, final

from torchrl_ext.deadline import Deadline, in_thread
from torchrl_ext.errors import (
    ConfigError,
    DeadlineError,
    EngineRefusedError,
    EngineUnreachableError,
    NotConnectedError,
    WeightSyncError,
)
from torchrl_ext.registry import Make, engines
from torchrl_ext.rpc.client import EngineClient
from torchrl_ext.rpc.engine import Engine
from torchrl_ext.rpc.pool import Pool
from torchrl_ext.rpc.port import Port
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.sync.engines.local import LocalPort
from torchrl_ext.types import EngineInfo, Info
from torchrl_ext.weights.source import is_torchrl

__all__ = ["EngineActor", "RayPort", "Served", "connect_actors", "ray_engine"]

_POLL_S = 0.05
_LIMITS = {"timeout_s", "load_timeout_s", "start_timeout_s"}
_SHORT = {"describe", "state", "release", "close"}  # calls that do not wait for weights

_hosted: dict[str, EngineActor] = {}  # by client, in an actor of another class


def _the_ray() -> Any:
    """Import `ray`, or raise ConfigError if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"ray cannot be imported: {error}", hint="pip install 'torchrl_ext[ray]'") from error
    return ray


@dataclass(frozen=True, kw_only=True)
class Served:
    """Settings of an engine server that an `EngineActor` starts on its node, and of the client that drives it there.

    Attributes:
        kind: ``"embedded"``, ``"vllm"``, ``"sglang"``.
        launch: fields of the engine's server spec (`torchrl_ext.serving.server.ServerSpec`): ``model``, ``dtype``, ...
        client: settings of the client (`torchrl_ext.rpc`).
    """

    kind: str
    launch: Mapping[str, Any]
    client: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> tuple[EngineClient, Any]:
        """Start the server; return its client and the server."""
        server = engines.part(self.kind, "server")(**self.launch).start()
        return engines.make(self.kind, url=server.url, **self.client), server


class EngineActor:
    """Actor class that hosts an engine in the actor's process, or drives a server on the actor's node.

    ``EngineActor.as_remote({"resources": {"engine": 1}}).remote(make)`` places one; `ray_engine` drives it.

    Args:
        make: called in the actor; returns the engine or model (a module, a TensorDict, a `WeightReceiver` or an
            `EngineClient`). `Served` starts a server.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        made = make()
        self.target, self._server = made if isinstance(made, tuple) else (made, None)
        engine = self.target if isinstance(self.target, Engine) else InProcessEngine(self.target)
        self._own = self._port = engine.port
        self.driven = engine.port.driven if isinstance(engine.port, LocalPort) else engine
        self.jobs: dict[str, Future[Any]] = {}  # of `begin`, by name

    @classmethod
    def as_remote(cls, remote_config: Mapping[str, Any] | None = None) -> Any:
        """Return this class as a Ray actor class with two concurrent calls, so that one of them can wait for weights.

        Args:
            remote_config: options of `ray.remote` (``num_cpus``, ``resources``, ``max_concurrency``, ...).

        Raises:
            ConfigError: ray is not installed.
        """
        return _the_ray().remote(**{"max_concurrency": 2, **(remote_config or {})})(cls)

    def call(self, name: str, *args: Any, **settings: Any) -> Any:
        """Call a method of the engine's `Port`, and return its answer.

        The port that `Port.suited` returns stays here and handles later calls; the answer is its ``pauses``, ``proves``
        and ``drops_first``.
        """
        if name != "suited":
            return getattr(self._port, name)(*args, **settings)
        before, self._port = self._port, self._own.suited(*args)
        if before is not self._port:
            before.close("")
        return self._port.pauses, self._port.proves, self._port.drops_first

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return ``function(target, *args)``, where ``target`` is the object that ``make`` returned."""
        return function(self.target, *args)

    def stop(self) -> None:
        """Stop the server, if there is one. It also stops with the actor's process."""
        if self._server is not None:
            self._server.stop()


def begin(
    held: Any, pick: Callable[[Any], Any], client: str, job: str, name: str, args: tuple[Any, ...], settings: Info
) -> tuple[Any] | None:
    """Run `EngineActor.call` in an actor of another class, on the engine that ``pick`` returns.

    Ray starts no other call of the actor before this one returns. In an actor with coroutines, which run meanwhile, a
    thread does the call; any other actor does it directly.

    Only one sender at a time drives an engine, so a client that joins removes the engine's earlier clients, unless they
    have running jobs; a removed client has to join again.

    Args:
        held: the actor's object.
        pick: takes it; returns the engine or model, as ``make`` of `EngineActor` does.
        client: id of the client, which has its own `EngineActor`.
        job: id of this call, for `answer`.
        name, args, settings: as for `EngineActor.call`.

    Returns:
        The answer in a tuple, or None if a thread has begun the call.
    """
    if client not in _hosted:
        _hosted[client] = EngineActor(partial(pick, held))
    host = _hosted[client]
    if name == "suited":
        for other, one in [*_hosted.items()]:
            if one is not host and one.driven is host.driven and all(job.done() for job in one.jobs.values()):
                del _hosted[other]
    call = partial(host.call, name, *args, **settings)
    if not inspect.getmembers(type(held), inspect.iscoroutinefunction):
        return (call(),)
    host.jobs[job] = in_thread(call, f"torchrl-ext-{name}")
    return None


def answer(held: Any, client: str, job: str) -> tuple[Any] | None:
    """Return the answer of a client's job in a tuple, or None while it runs; raise the job's error.

    Raises:
        NotConnectedError: another client has joined and removed this one.
    """
    del held
    if client not in _hosted:
        raise NotConnectedError(
            "another client joined this engine before this one had its answer", hint="connect again"
        )
    jobs = _hosted[client].jobs
    return (jobs.pop(job).result(),) if jobs[job].done() else None


def _asked(name: str) -> Any:
    """Return a method that calls the port in the actor."""

    def ask(self: RayPort, *args: Any, **settings: Any) -> Any:
        return self._ask(name, *args, **settings)

    return ask


@final
class RayPort(Port):
    """Calls the port of an engine in a Ray actor.

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
        ray = _the_ray()
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
        """See `Port.describe`; ``url`` is the actor's, and `address` returns the engine's."""
        return replace(self._ask("describe"), url=self.url, kind=self.kind)

    def address(self) -> str:
        """Return the engine's URL, if it is a server."""
        return str(self._ask("describe").url)

    def suited(self, info: Info) -> Port:
        pauses, proves, drops_first = self._ask("suited", info)
        if (pauses, proves, drops_first) == (self.pauses, self.proves, self.drops_first):
            return self
        found = copy.copy(self)
        vars(found).update(pauses=pauses, proves=proves, drops_first=drops_first)
        return found

    state = _asked("state")
    tell = _asked("tell")
    hold = _asked("hold")
    release = _asked("release")
    abandon = _asked("abandon")
    drop_cached = _asked("drop_cached")
    make_idle = _asked("make_idle")
    label_as = _asked("label_as")
    refuse_sleep = _asked("refuse_sleep")
    sleep = _asked("sleep")
    wake = _asked("wake")
    logprobs = _asked("logprobs")

    def close(self, connection: str) -> None:
        with suppress(EngineUnreachableError, EngineRefusedError):  # the engine is gone, or has another sender
            self._ask("close", connection)

    def _ask(self, name: str, *args: Any, **settings: Any) -> Any:
        """Call a method of the port in the actor, and wait for its answer; our own errors keep their class."""
        errors = _the_ray().exceptions
        limit_s = max(self._timeout_s if name in _SHORT else self.timeout_s, self._first_timeout_s)
        try:
            found = self._answer(limit_s, name, args, settings)
        except errors.RayTaskError as error:
            raise self._failed(name, error.cause) from error
        except errors.GetTimeoutError as error:
            raise DeadlineError(
                f"no answer to {name!r} within {limit_s:g} s from {self.url}",
                state="the call may still run in the actor",
                hint="read the actor's log, or raise load_timeout_s",
            ) from error
        except errors.RayActorError as error:
            raise EngineUnreachableError(
                f"{str(error).strip().rstrip('.')}; {self.url} is dead",
                state="its weights are lost with it",
                hint="start another actor and connect to it",
            ) from error
        self._first_timeout_s = 0.0
        return found

    def _answer(self, timeout_s: float, name: str, args: tuple[Any, ...], settings: Info) -> Any:
        """Return the actor's answer; raises Ray's errors unchanged."""
        ray, actor, within = _the_ray(), self._actor, Deadline(timeout_s)
        if self._pick is None:
            return ray.get(actor.call.remote(name, *args, **settings), timeout=timeout_s)
        job = uuid.uuid4().hex
        begun = actor.__ray_call__.remote(begin, self._pick, self._name, job, name, args, settings)
        (found,) = ray.get(begun, timeout=timeout_s) or within.poll(
            lambda: ray.get(actor.__ray_call__.remote(answer, self._name, job), timeout=max(_POLL_S, within.left_s)),
            late=ray.exceptions.GetTimeoutError,
            longest_s=_POLL_S,
        )
        return found

    def _failed(self, name: str, cause: BaseException) -> WeightSyncError:
        if isinstance(cause, _the_ray().exceptions.RaySystemError) and "torchrl_ext" in str(cause):
            return ConfigError(
                f"{str(cause).splitlines()[0]}; {self.url} cannot be driven",
                expected="an actor that can import this package",
                hint="install this package in the environment of the actor",
            )
        if isinstance(cause, WeightSyncError):
            return cause
        return EngineRefusedError(f"{type(cause).__name__}: {cause}; {self.url} did not {name}")


def ray_engine(actor: Any, **settings: Any) -> Engine:
    """Return the client of the engine in an actor.

    Args:
        actor: the actor's handle or name.
        pick: None for an `EngineActor`. For an actor of any other class, a function that is called in the actor with
            its object and returns the engine or model, as ``make`` of `EngineActor` does. Ray pickles it by
            reference or by value, and the actor's environment needs this package.
        timeout_s: deadline of each short call, in seconds.
        load_timeout_s: deadline of joining a transport and of receiving weights, in seconds.
        start_timeout_s: deadline of the first call, which waits for the actor and its engine to start, in seconds.

    Raises:
        ConfigError: ray is not installed, or no actor has this name.
    """
    return Engine(RayPort(actor, **settings))


def connect_actors(engine: Any, **settings: Any) -> EngineClient:
    """Return the client of engines in Ray actors or of TorchRL's engines; `make_engine("ray", ...)` calls it.

    The client drives the vLLM inside TorchRL's engines, whose workers receive the weights directly.

    Args:
        engine: handle or name of an `EngineActor`, TorchRL's `AsyncVLLM`, `RayLLMWorker` or `LocalLLMWrapper`, or a
            sequence of these.
        settings: as for `ray_engine`; for TorchRL's engines without ``pick``, but with ``pause_mode`` and
            ``keep_cache`` as for `InProcessEngine`.

    Raises:
        ConfigError: ray is not installed; there is no such actor; the engine does not take a setting; an `AsyncVLLM`
            has no replicas; or the engine is another implementation of TorchRL's interface, which cannot report whether
            an update is complete.
    """
    if isinstance(engine, Sequence) and not isinstance(engine, str):
        return Pool([connect_actors(one, **settings) for one in engine])
    torchrls = is_torchrl(engine, "RLvLLMEngine")
    known = _LIMITS | ({"pause_mode", "keep_cache"} if torchrls else {"pick"})
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise ConfigError(
            f"{'TorchRL' if torchrls else 'Ray'}'s engines take no {', '.join(unknown)}",
            expected=f"settings from {', '.join(sorted(known))}",
        )
    if not torchrls:
        return ray_engine(engine, **settings)
    vllm: dict[str, Any] = {name: settings.pop(name) for name in ("pause_mode", "keep_cache") if name in settings}
    if settings.keys() & {"timeout_s", "load_timeout_s"}:
        vllm["timeout_s"] = settings.get("load_timeout_s", settings.get("timeout_s"))
    if is_torchrl(engine, "LocalLLMWrapper"):
        return InProcessEngine(engine, url=f"{type(engine).__name__}-{id(engine):x}", **vllm)
    if is_torchrl(engine, "RayLLMWorker"):
        return ray_engine(engine.ray_actor, pick=partial(InProcessEngine, **vllm), **settings)
    if not is_torchrl(engine, "AsyncVLLM"):
        raise ConfigError(
            f"{type(engine).__name__} implements RLvLLMEngine, whose update_weights cannot tell an incomplete update "
            "from a complete one",
            expected="TorchRL's AsyncVLLM, RayLLMWorker or LocalLLMWrapper",
            hint="give make_engine('inprocess', engine=...) the vLLM, the module or the tensors inside",
        )
    if not engine.actors:
        raise ConfigError(
            "this AsyncVLLM has no replicas", hint="create it with AsyncVLLM.launch or AsyncVLLM.from_pretrained"
        )
    return Pool([ray_engine(actor, pick=partial(_async_llm, **vllm), **settings) for actor in engine.actors])


def _async_llm(replica: Any, **settings: Any) -> InProcessEngine:
    """Return the client of the `AsyncLLM` in a replica of `AsyncVLLM`; runs in the replica's actor."""
    return InProcessEngine(replica.engine, **settings)


RAY = Make(client=connect_actors)
