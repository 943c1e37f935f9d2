"""What runs in a Ray actor: `EngineActor` hosts any engine and its client, and `Served` starts a server there.

`begin` and `answer` do the same in an actor of another class, beside what it does by itself.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torchrl_ext import registry
from torchrl_ext.deadline import in_thread
from torchrl_ext.errors import ConfigError, NotConnectedError
from torchrl_ext.messages import replaced
from torchrl_ext.rpc.client import EngineClient
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.types import EngineRow

__all__ = ["Answer", "EngineActor", "Served", "answer", "as_remote", "begin", "the_ray"]

log = logging.getLogger("torchrl_ext")

Answer = tuple[Any, EngineRow, bool]
"""What a client's method returned, the engine's row after it, and whether the engine compares digests."""

_STEPS = {"rehearse", "prefetch", "begin", "load", "verify", "commit", "close"}
_hosted: dict[str, EngineActor] = {}
_jobs: dict[str, dict[str, Future[Answer]]] = {}  # by client, and by name


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
        launch: settings of the server (`torchrl_ext.serving`): ``model_dir``, ``dtype``, ...
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
        server = registry.engines.part(self.kind, "server")(**self.launch)
        return registry.engines.make(self.kind, url=server.url, **self.client), server


class EngineActor:
    """The class that runs in a Ray actor, with an engine of the actor's process or a server on its node.

    Args:
        make: called in the actor; returns what takes the weights (a module, a TensorDict, a `WeightReceiver` or an
            `EngineClient`). `Served` makes a server.

    ``EngineActor.as_remote({"resources": {"engine": 1}}).remote(make)`` places one; `RayEngine` drives it.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        made = make()
        self.target, self._server = made if isinstance(made, tuple) else (made, None)
        self._connection = ""  # of the sender that joined last
        self._client = self.target if isinstance(self.target, EngineClient) else InProcessEngine(self.target)

    @classmethod
    def as_remote(cls, remote_config: Mapping[str, Any] | None = None) -> Any:
        """Return this class as a Ray actor class with room for two calls: one waits for weights, one asks or closes."""
        return as_remote(cls, {"max_concurrency": 2, **(remote_config or {})})

    def call(self, connection: str, name: str, *args: Any) -> Answer:
        """Call a method of the engine's client, without callbacks, for the sender that joined as ``connection``.

        Raises:
            EngineRefusedError: a step of an update, and another sender has joined since; nothing is touched.
        """
        if name == "connect":
            self._connection = connection
        elif name in _STEPS and self._connection not in ("", connection):
            raise replaced("another one has joined")
        found = getattr(self._client, name)(*args)
        (row,) = self._client.rows()
        return found, row, self._client.verifies

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return ``function(target, *args)``, where the target is what ``make`` returned."""
        return function(self.target, *args)

    def stop(self) -> None:
        """End the server, where there is one. It also ends with the actor's process."""
        if self._server is not None:
            self._server.stop()


def begin(
    held: Any, pick: Callable[[Any], Any], client: str, job: str, connection: str, name: str, *args: Any
) -> Answer | None:
    """Run `EngineActor.call` over what ``pick`` finds in ``held``; to be run in the actor of ``held``.

    Ray starts no other call of the actor before this one returns. An actor with coroutines goes on meanwhile, so a
    thread does the job there. Any other actor does one thing at a time, and this is it.

    Args:
        held: the actor's object.
        pick: takes it; returns what takes the weights, as ``make`` of `EngineActor` does.
        client: names the client, which has an `EngineActor` of its own.
        job: names this call, for `answer`.
        connection, name, args: of `EngineActor.call`.

    Returns:
        None where the job has begun; or the answer.
    """
    if client not in _hosted:
        _hosted[client] = EngineActor(partial(pick, held))
    call = partial(_hosted[client].call, connection, name, *args)
    if name == "connect":
        call = partial(_in_place_of, _end_others(client), call)
    if name == "close":
        del _hosted[client]
        running = {key: one for key, one in _jobs.pop(client, {}).items() if not one.done()}
        _jobs.update({client: running} if running else {})  # of calls that were given up nobody asks any more
    if not inspect.getmembers(type(held), inspect.iscoroutinefunction):
        return call()
    _jobs.setdefault(client, {})[job] = in_thread(call, f"torchrl-ext-{name}")
    return None


def _end_others(client: str) -> list[EngineActor]:
    """Forget the clients of the same engine for which no job runs, and return what they have here.

    One sender at a time drives an engine. Those of a trainer that died never close; one that lives joins anew.
    """
    target = _hosted[client].target
    found = [name for name, one in _hosted.items() if name != client and one.target is target]
    idle = [name for name in found if all(job.done() for job in _jobs.get(name, {}).values())]
    for name in idle:
        _jobs.pop(name, None)
    return [_hosted.pop(name) for name in idle]


def _in_place_of(others: Sequence[EngineActor], connect: Callable[[], Answer]) -> Answer:
    for other in others:
        try:
            other.call(other._connection, "close")
        except Exception:
            log.warning("a client that another one replaces did not leave its transport", exc_info=True)
    return connect()


def answer(held: Any, client: str, job: str) -> Answer | None:
    """Return the answer of a client's job, or None while it runs; raise what it raised.

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
    return found.result()
