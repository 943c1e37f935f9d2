"""What runs in a Ray actor: `EngineActor` hosts any engine and its client, and `Served` starts a server there.

`begin` and `answer` do the same in an actor of another class, beside what it does by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torchrl_ext import registry
from torchrl_ext.deadline import in_thread
from torchrl_ext.errors import ConfigError, NotConnectedError
from torchrl_ext.rpc.client import EngineClient
from torchrl_ext.rpc.engine import Engine
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.types import Info

__all__ = ["EngineActor", "Served", "Traits", "answer", "as_remote", "begin", "the_ray"]

Traits = tuple[bool, bool, bool]
"""`Port.pauses`, `Port.proves` and `Port.drops_first`."""

_hosted: dict[str, EngineActor] = {}
_jobs: dict[str, dict[str, Future[Any]]] = {}  # by client, and by name


def the_ray() -> Any:
    """Return the module `ray`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"ray cannot be imported: {error}", hint="pip install 'torchrl_ext[ray]'") from error
    return ray


def as_remote(cls: type[Any], remote_config: Mapping[str, Any] | None = None) -> Any:
    """Return ``cls`` as a Ray actor class, made by TorchRL's own helper.

    Args:
        cls: what runs in the actor.
        remote_config: options of `ray.remote` (``num_cpus``, ``resources``, ``max_concurrency``, ...).

    Raises:
        ConfigError: ray is not installed.
    """
    the_ray()
    from torchrl._utils import as_remote as torchrls

    default = {"max_restarts": 0}  # Ray's own, since `ray.remote` cannot be called with no option at all
    return torchrls.__func__(cls, default | dict(remote_config or {}))


@dataclass(frozen=True, kw_only=True)
class Served:
    """A recipe of an engine server that an `EngineActor` starts on its node, with the client that drives it there.

    Attributes:
        kind: ``"embedded"``, ``"vllm"``, ``"sglang"``.
        launch: fields of the make's server spec (`torchrl_ext.serving.server.ServerSpec`): ``model``, ``dtype``, ...
        client: settings of its client (`torchrl_ext.rpc`).
    """

    kind: str
    launch: Mapping[str, Any]
    client: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> tuple[EngineClient, Any]:
        """Start the server, and make its client.

        Returns:
            The client, and the server.
        """
        server = registry.engines.part(self.kind, "server")(**self.launch).start()
        return registry.engines.make(self.kind, url=server.url, **self.client), server


class EngineActor:
    """The class that runs in a Ray actor, with an engine of the actor's process or a server on its node.

    Args:
        make: called in the actor; returns what takes the weights (a module, a TensorDict, a `WeightReceiver` or an
            `EngineClient`). `Served` makes a server.

    ``EngineActor.as_remote({"resources": {"engine": 1}}).remote(make)`` places one; `ray_engine` drives it.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        made = make()
        self.target, self._server = made if isinstance(made, tuple) else (made, None)
        engine = self.target if isinstance(self.target, Engine) else InProcessEngine(self.target)
        self._own = self._port = engine.port

    @classmethod
    def as_remote(cls, remote_config: Mapping[str, Any] | None = None) -> Any:
        """Return this class as a Ray actor class with room for two calls: one waits for weights, one asks or closes."""
        return as_remote(cls, {"max_concurrency": 2, **(remote_config or {})})

    def call(self, name: str, *args: Any, **settings: Any) -> Any:
        """Call a method of the engine's `Port`, and return its answer."""
        return getattr(self._port, name)(*args, **settings)

    def suited(self, info: Info) -> Traits:
        """Take the port that the engine needs to join a transport; see `Port.suited`."""
        before, self._port = self._port, self._own.suited(info)
        if before is not self._port:
            before.close("")
        return self._port.pauses, self._port.proves, self._port.drops_first

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return ``function(target, *args)``, where the target is what ``make`` returned."""
        return function(self.target, *args)

    def stop(self) -> None:
        """End the server, where there is one. It also ends with the actor's process."""
        if self._server is not None:
            self._server.stop()


def begin(
    held: Any, pick: Callable[[Any], Any], client: str, job: str, name: str, args: tuple[Any, ...], settings: Info
) -> tuple[Any] | None:
    """Call a method of an `EngineActor` over what ``pick`` finds in ``held``; to be run in the actor of ``held``.

    Ray starts no other call of the actor before this one returns. An actor with coroutines goes on meanwhile, so a
    thread does the job there. Any other actor does one thing at a time, and this is it.

    Args:
        held: the actor's object.
        pick: takes it; returns what takes the weights, as ``make`` of `EngineActor` does.
        client: names the client, which has an `EngineActor` of its own.
        job: names this call, for `answer`.
        name, args, settings: the method, and its arguments.

    Returns:
        None where the job has begun; or the answer, in a tuple.
    """
    if client not in _hosted:
        _hosted[client] = EngineActor(partial(pick, held))
    call = partial(getattr(_hosted[client], name), *args, **settings)
    if name == "suited":  # the client joins a transport
        _end_others(client)
    if args[:1] == ("close",):
        del _hosted[client]
        running = {key: one for key, one in _jobs.pop(client, {}).items() if not one.done()}
        _jobs.update({client: running} if running else {})  # of calls that were given up nobody asks any more
    if not inspect.getmembers(type(held), inspect.iscoroutinefunction):
        return (call(),)
    _jobs.setdefault(client, {})[job] = in_thread(call, f"torchrl-ext-{name}")
    return None


def _end_others(client: str) -> None:
    """Forget the clients of the same engine for which no job runs; its workers leave what these joined by themselves.

    One sender at a time drives an engine. Those of a trainer that died never close; one that lives joins anew.
    """
    target = _hosted[client].target
    found = [name for name, one in _hosted.items() if name != client and one.target is target]
    for name in [name for name in found if all(job.done() for job in _jobs.get(name, {}).values())]:
        _jobs.pop(name, None)
        del _hosted[name]


def answer(held: Any, client: str, job: str) -> tuple[Any] | None:
    """Return the answer of a client's job, in a tuple, or None while it runs; raise what it raised.

    Raises:
        NotConnectedError: the client was closed before it asked.
    """
    del held
    jobs = _jobs.get(client, {})
    if job not in jobs:
        raise NotConnectedError("this client left the engine before it asked for an answer", hint="connect again")
    if not jobs[job].done():
        return None
    found = jobs.pop(job)
    if not jobs:
        del _jobs[client]
    return (found.result(),)
