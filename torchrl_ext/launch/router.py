"""A router as a child process: vLLM's, and SGLang's for SGLang's pools, which vLLM's cannot serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchrl_ext.errors import ConfigError
from torchrl_ext.launch.environments import router_python, sglang_router_python, to_stderr
from torchrl_ext.launch.processes import Launched, ServerProcess, free_port, reachable
from torchrl_ext.launch.stock import as_flags, usable_port

__all__ = ["RouterProcess"]


@dataclass(frozen=True, kw_only=True)
class _Make:
    """What routers of one make call the same things (vllm-router 0.1.17, sglang-router 0.3.2)."""

    module: str
    python: Callable[[Callable[[str], None]], Path]
    policy: str
    pools: str
    warnings: str


_VLLM = _Make(
    module="vllm_router.launch_router",
    python=router_python,
    policy="consistent_hash",
    pools="--vllm-pd-disaggregation",  # one request after the other, by what vLLM's connectors hand on
    warnings="warning",
)
_POOLS = {
    "sglang": _Make(
        module="sglang_router.launch_router",
        python=sglang_router_python,
        policy="cache_aware",
        pools="--pd-disaggregation",  # both at once, with the host, the port and the room where they meet
        warnings="warn",
    )
}
"""Who routes to the pools of a kind of engine, where that is not `_VLLM`."""


class RouterProcess(Launched):
    """Starts a router; a context manager. Requests of one ``X-Session-ID`` stay on one engine.

    It is vLLM's, for regular workers of any kind and for pools of vLLM's. Pools of SGLang's get SGLang's, which asks
    both at once; vLLM's would ask one after the other, as its own are to be asked. It comes from this environment where
    it is installed, else from one that is made for it on first use.

    Its circuit breaker is off: an engine that is paused for new weights is slow, not broken. It leaves out an engine
    whose health route failed three times, ten seconds apart; who is in service otherwise is decided by who knows the
    engines' weights (`torchrl_ext.rollout.routing`).

    Args:
        workers: base addresses of regular engines, registered at the start. More can be added later.
        prefill: base addresses of prefill engines, or pairs of address and bootstrap port. Static.
        decode: base addresses of decode engines. Static.
        kind: of the engines, as in `EngineInfo`.
        health_route: where it asks engines for their health; None for ``/health``.
        host: address to listen on.
        port: 0 picks a free one.
        policy: ``consistent_hash``, ``sticky_least_loaded``, ``cache_aware``, ``round_robin``, ...; None takes the
            first, and of SGLang's the third.
        request_timeout_s: deadline of a request through the router, pauses of its engine included, in seconds.
        extra_args: more arguments for the router.
        log_path: file for what it prints; None takes a temporary one.
        python: interpreter with the router; None finds or makes one.
        report: takes a line of progress at a time.
        start_timeout_s: deadline of the start, in seconds; making an environment does not count.

    Raises:
        ConfigError: workers and pools together, one pool without the other, or the port is taken.
        EngineError: it ended while starting; the message has the end of its log.
        DeadlineError: it was not up in time.
    """

    def __init__(
        self,
        workers: Sequence[str] = (),
        *,
        prefill: Sequence[str | tuple[str, int]] = (),
        decode: Sequence[str] = (),
        kind: str = "vllm",
        health_route: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        policy: str | None = None,
        request_timeout_s: int = 1800,
        extra_args: Sequence[str] = (),
        log_path: str | Path | None = None,
        python: str | Path | None = None,
        report: Callable[[str], None] = to_stderr,
        start_timeout_s: float = 60.0,
    ) -> None:
        if workers and (prefill or decode):
            raise ConfigError("a router has regular workers, or a prefill and a decode pool", hint="start two routers")
        if bool(prefill) != bool(decode):
            raise ConfigError("a prefill pool needs a decode pool, and the other way round")
        port = usable_port(port, host)
        make = _POOLS.get(kind, _VLLM) if prefill else _VLLM
        python = Path(python or make.python(report))
        arguments = {
            "host": host,
            "port": port,
            "policy": policy or make.policy,
            "prometheus-port": free_port(),  # two routers would meet at its default
            "request-timeout-secs": request_timeout_s,
            "health-check-interval-secs": 10,
            "health-check-endpoint": health_route,
            "worker-startup-timeout-secs": max(1, int(start_timeout_s)),
            "worker-startup-check-interval": 1,
            "log-level": make.warnings,
        }
        command = [str(python), "-m", make.module, *as_flags(arguments)]
        command += ["--disable-circuit-breaker", *extra_args]
        self.static = bool(prefill)
        if self.static:
            command.append(make.pools)
            for worker in prefill:
                command += ["--prefill", *([worker] if isinstance(worker, str) else map(str, worker))]
            for url in decode:
                command += ["--decode", url]
        elif workers:
            command += ["--worker-urls", *workers]
        server = ServerProcess(
            command,
            name="router",
            url=f"http://{reachable(host)}:{port}",
            health="/liveness",
            log_path=log_path,
            start_timeout_s=start_timeout_s,
        )
        super().__init__(server)
