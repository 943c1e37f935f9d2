"""Run an engine vendor's router as a child process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torchrl_ext.base.registry import engines
from torchrl_ext.control.serving.processes import GuardedProcess, free_port
from torchrl_ext.control.serving.server import ServerSpec, as_flags, start
from torchrl_ext.control.serving.topology import check_pools

__all__ = ["RouterProcess", "RouterSpec"]


@dataclass(frozen=True, kw_only=True)
class RouterSpec(ServerSpec):
    """The settings and the command line of a router; see `ServerSpec` for the common ones.

    The circuit breaker is off: an engine that is paused for new weights is slow, not broken. The router leaves out an
    engine whose health route failed three times, ten seconds apart; `torchrl_ext.control.serving.routing`, which knows the
    engines' weights, decides which other engines are in service.

    Attributes:
        policy_of_sessions: the router's policy that keeps a session on one engine.
        pools: the router's argument for prefill and decode pools.
        more: arguments that the router always gets.
        workers: base addresses of regular engines, registered at the start; more can be added later.
        prefill: base addresses of prefill engines, or pairs of address and bootstrap port (SGLang); fixed at the start.
        decode: base addresses of decode engines; fixed at the start.
        health_route: the engines' route that the router checks; None uses ``/health``.
        policy: ``sticky_least_loaded``, ``cache_aware``, ``round_robin``, ...; None uses `policy_of_sessions`.
        request_timeout_s: deadline of a request through the router, in seconds, including pauses of its engine.
    """

    name: ClassVar[str] = "router"
    health: ClassVar[str] = "/liveness"
    policy_of_sessions: ClassVar[str]
    pools: ClassVar[str]
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
            "prometheus-port": free_port(),  # two routers would share the default
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

    A session's requests stay on one engine: vLLM's router identifies the session by ``X-Session-ID``, SGLang's by
    ``X-SMG-Routing-Key``; our clients send both. With ``make="vllm"``, SGLang requests lose their seeds and minimum
    lengths, because vLLM's router drops these fields, and SGLang pools do not work.

    Args:
        workers: base addresses of regular engines.
        kind: kind of the engines, as in `EngineInfo`.
        make: the vendor whose router is started; None uses ``kind``.
        settings: further fields of `RouterSpec`.
    """
    return start(engines.part(make or kind, "router")(workers, **settings))
