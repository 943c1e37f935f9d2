"""`RayLauncher` starts planned engines on the nodes of a Ray cluster, each in an actor that ends it."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, WeightSyncError
from torchrl_ext.registry import engines
from torchrl_ext.serving.launchers import EngineLauncher, LocalLauncher, RunningEngine
from torchrl_ext.serving.topology import EnginePlan

__all__ = ["RayLauncher"]

log = logging.getLogger("torchrl_ext")

_ANSWER_S = 30.0
_POLL_S = 0.2


class RayLauncher(EngineLauncher):
    """Starts each engine in a Ray actor. Ray picks the GPUs and the node; restarts use the same node.

    Args:
        remote: options of an engine's actor (``num_cpus``, ``resources``, ...), or a callable that takes the plan and
            returns them; None requests the plan's number of GPUs if the cluster has any.
        start_timeout_s: deadline of a start, in seconds, including the wait for a node with free resources.
        api_key: the key that engines require; None generates one. Clients need it (`OwnedEngines` passes it on).
        expose: let vllm and sglang engines listen on their node's address, which other nodes, and strangers, can reach.
            Otherwise they listen on 127.0.0.1, and a plan that Ray places on a node other than this process's is
            refused. SGLang's key guards all routes. vLLM's key guards requests and our routes but not ``/pause``,
            ``/update_weights`` and ``/collective_rpc``: the network has to keep strangers out.
        settings: for the `LocalLauncher` on the node.

    Raises:
        ConfigError: Ray is not installed or not initialised.
    """

    def __init__(
        self,
        *,
        remote: Mapping[str, Any] | Callable[[EnginePlan], Mapping[str, Any]] | None = None,
        start_timeout_s: float = 600.0,
        api_key: str | None = None,
        expose: bool = False,
        **settings: Any,
    ) -> None:
        self._ray, self.api_key = _ray(), api_key or secrets.token_hex(32)
        self._remote, self._settings, self._expose, self._timeout_s = remote, settings, expose, start_timeout_s
        self._first: dict[str, _Engine] = {}

    def launch(
        self, plan: EnginePlan, encoders: Sequence[str] = (), *, cancel: threading.Event | None = None
    ) -> RunningEngine:
        wanted = self._remote(plan) if callable(self._remote) else self._remote
        if wanted is None:
            wanted = {"num_gpus": len(plan.gpus)} if self._ray.cluster_resources().get("GPU") else {}
        settings, before = {**self._settings, "api_key": self.api_key}, self._first.get(plan.name)
        if before is not None:  # clients and routers know that address
            settings["port"] = urlsplit(before.url).port
            wanted = {**wanted, **self._on_node(before)}
        home = None if self._expose else self._ray.util.get_node_ip_address()
        actor = self._ray.remote(_Node).options(**{"num_cpus": 1, **wanted}).remote(settings, home)
        engine = _Engine(self._ray, actor, plan.name)
        try:
            engine.url, engine.node = engine.ask(
                "launch", plan, tuple(encoders), timeout_s=self._timeout_s, cancel=cancel
            )
            if before is not None and engine.url != before.url:
                raise EngineError(
                    f"engine {plan.name} came up at {engine.url}",
                    expected=before.url,
                    state="it was ended",
                    hint="let remote= place it on its earlier node",
                )
        except BaseException:
            engine.kill()  # an actor that has no node or is still launching would not answer `stop`
            raise
        unguarded = engines.part(plan.kind, "server").unguarded
        if unguarded and self._expose:
            words = "%s listens at %s: its key guards requests and our routes, but not %s; use a firewall"
            log.warning(words, plan.name, engine.url, unguarded)
        self._first.setdefault(plan.name, engine)
        return engine

    def _on_node(self, before: _Engine) -> dict[str, Any]:
        """Return actor options for the node where an engine ran, or for the node that now has its address."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node, address = before.node
        there = [row["NodeID"] for row in self._ray.nodes() if row["Alive"] and row["NodeManagerAddress"] == address]
        if not there:
            raise EngineError(
                f"the node {address} of engine {before.name} is not part of the Ray cluster",
                expected=f"a node where the engine can be started again at {before.url}",
                state="the engine does not run",
                hint="restore the node; the supervisor tries again at its next check",
            )
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node if node in there else there[0], soft=False)}


class _Node:
    """The actor that starts an engine on its node; if the actor's process dies, the engine's guard ends the engine.

    With ``home``, the address of the job's node, the engine listens on 127.0.0.1 and other nodes are refused.
    """

    def __init__(self, settings: dict[str, Any], home: str | None) -> None:
        self._settings, self._home = settings, home
        self._engine: RunningEngine | None = None

    def launch(self, plan: EnginePlan, encoders: tuple[str, ...]) -> tuple[str, tuple[str, str]]:
        """Start the engine; return its address and the node's (id, address)."""
        ray, settings = _ray(), dict(self._settings)
        context, address = ray.get_runtime_context(), ray.util.get_node_ip_address()
        if "host" in engines.part(plan.kind, "server").settings() and "host" not in settings:
            if self._home is None:
                settings["host"] = address
            elif self._home != address:
                raise ConfigError(
                    f"{plan.name} would listen on 127.0.0.1 of node {address}, and the job runs on node {self._home}",
                    expected="engines on the job's node, or expose=True",
                    state="it was not started",
                    hint="RayLauncher(expose=True) opens its routes to anyone who can reach the node; protect it "
                    "with a firewall",
                )
        # the job's device numbers mean nothing on a node: the engine gets the devices that Ray assigned to the actor
        plan = replace(plan, gpus=tuple(range(len(plan.gpus))))
        settings.setdefault("devices", tuple(map(str, context.get_accelerator_ids().get("GPU", ()))))
        self._engine = LocalLauncher(**settings).launch(plan, encoders)
        return self._engine.url, (context.get_node_id(), address)

    def ask(self, method: str) -> Any:
        """Call a method of the engine; return None if none was started."""
        return None if self._engine is None else getattr(self._engine, method)()


class _Engine:
    """A `RunningEngine` that calls an engine's actor."""

    def __init__(self, ray: Any, actor: Any, name: str) -> None:
        self._ray, self._actor, self.name = ray, actor, name
        self.url, self.node = "", ("", "")

    def alive(self) -> bool:
        with suppress(WeightSyncError):
            return bool(self.ask("ask", "alive"))
        return False

    def log(self) -> str:
        return str(self.ask("ask", "log"))

    def stop(self) -> None:
        with suppress(WeightSyncError):  # an engine that does not answer ends with its actor
            self.ask("ask", "stop")
        self.kill()

    def kill(self) -> None:
        """Kill the actor, and with it the engine."""
        self._ray.kill(self._actor)

    def ask(
        self, method: str, *arguments: Any, timeout_s: float = _ANSWER_S, cancel: threading.Event | None = None
    ) -> Any:
        """Call the actor; raise its own WeightSyncError, DeadlineError if it is late, or EngineError otherwise."""

        def late() -> WeightSyncError:
            if cancel is not None and cancel.is_set():
                return EngineError(f"the start of engine {self.name} was abandoned", state="its actor is ended")
            return DeadlineError(
                f"the actor of engine {self.name} did not {method} within {timeout_s:g} s",
                hint="check with `ray status` whether a node has the resources that it requests",
            )

        try:
            answer = getattr(self._actor, method).remote(*arguments)
            within = Deadline(timeout_s, stop=cancel)
            within.poll(lambda: self._ray.wait([answer], timeout=_POLL_S)[0], late=late, longest_s=0.0)
            return self._ray.get(answer)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, WeightSyncError) else EngineError(str(error)) from error
        except self._ray.exceptions.RayError as error:
            raise EngineError(f"the actor of engine {self.name} is dead: {error}") from error


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError("engines on a Ray cluster need Ray", hint="pip install 'torchrl_ext[ray]'") from error
    return ray
