"""Run the router that goes with a make of engines as a child process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torchrl_ext.registry import engines
from torchrl_ext.serving.processes import GuardedProcess, free_port
from torchrl_ext.serving.server import ServerSpec, as_flags, start
from torchrl_ext.serving.topology import check_pools

__all__ = ["RouterProcess", "RouterSpec"]


@dataclass(frozen=True, kw_only=True)
class RouterSpec(ServerSpec):
    """The settings and the command line of a router; see `ServerSpec` for the common ones.

    Its circuit breaker is off: an engine that is paused for new weights is slow, not broken. It leaves out an engine
    whose health route failed three times, ten seconds apart; which others are in service is decided where the engines'
    weights are known (`torchrl_ext.serving.routing`).

    Attributes:
        policy_of_sessions: its policy that keeps a session on one engine.
        pools: its argument for prefill and decode pools.
        bootstraps: whether it has to know the ports where decode engines meet prefill engines.
        more: arguments that it always gets.
        workers: base addresses of regular engines, registered at the start. More can be added later.
        prefill: base addresses of prefill engines, or pairs of address and bootstrap port. Static.
        decode: base addresses of decode engines. Static.
        health_route: where it asks engines for their health; None for ``/health``.
        host: address to listen on.
        policy: ``sticky_least_loaded``, ``cache_aware``, ``round_robin``, ...; None takes `policy_of_sessions`.
        request_timeout_s: deadline of a request through the router, pauses of its engine included, in seconds.
        extra_args: more arguments for the router.
    """

    name: ClassVar[str] = "router"
    health: ClassVar[str] = "/liveness"
    policy_of_sessions: ClassVar[str]
    pools: ClassVar[str]
    bootstraps: ClassVar[bool] = False
    more: ClassVar[tuple[str, ...]] = ()

    workers: Sequence[str] = field(default=(), kw_only=False)
    prefill: Sequence[str | tuple[str, int]] = ()
    decode: Sequence[str] = ()
    health_route: str | None = None
    host: str = "127.0.0.1"
    policy: str | None = None
    request_timeout_s: int = 1800
    extra_args: Sequence[str] = ()
    start_timeout_s: float = 60.0

    def check(self) -> None:
        given = {"regular": self.workers, "prefill": self.prefill, "decode": self.decode}
        check_pools("a router", [worker_type for worker_type, urls in given.items() if urls])
        super().check()

    def command(self, port: int) -> list[str]:
        arguments = {
            "host": self.host,
            "port": port,
            "policy": self.policy or self.policy_of_sessions,
            "prometheus-port": free_port(),  # two routers would share its default
            "request-timeout-secs": self.request_timeout_s,
            "health-check-interval-secs": 10,
            "health-check-endpoint": self.health_route,
            "worker-startup-timeout-secs": max(1, int(self.start_timeout_s)),
            "worker-startup-check-interval": 1,
        }
        command = [str(self.interpreter), "-m", self.module, *as_flags(arguments)]
        command += ["--disable-circuit-breaker", *self.more, *self.extra_args]
        command += [self.pools] if self.prefill else []
        for worker in self.prefill:
            command += ["--prefill", *([worker] if isinstance(worker, str) else map(str, worker))]
        for url in self.decode:
            command += ["--decode", url]
        return command + (["--worker-urls", *self.workers] if self.workers else [])


def RouterProcess(
    workers: Sequence[str] = (), *, kind: str = "vllm", make: str | None = None, **settings: Any
) -> GuardedProcess:
    """Start a router and wait until it is healthy; see `start`.

    Requests of one session stay on one engine: vLLM's router knows them by ``X-Session-ID``, SGLang's by
    ``X-SMG-Routing-Key``, and our clients send both. With ``make="vllm"`` SGLang engines lose the seeds and least
    lengths of requests, since vLLM's router drops these fields, and their pools do not work.

    Args:
        workers: base addresses of regular engines.
        kind: of the engines, as in `EngineInfo`.
        make: the make of engine whose router is started; None takes ``kind``.
        settings: further fields of `RouterSpec`.
    """
    return start(engines.part(make or kind, "router")(workers, **settings))
