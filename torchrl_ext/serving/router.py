"""Run a router as a child process: vLLM's, or SGLang's for SGLang engines, whose requests it knows in full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from torchrl_ext.errors import ConfigError
from torchrl_ext.serving.environments import SGLANG_ROUTER, VLLM_ROUTER, Recipe, to_stderr
from torchrl_ext.serving.processes import free_port
from torchrl_ext.serving.server import Server, ServerSpec, as_flags
from torchrl_ext.serving.topology import check_pools

__all__ = ["RouterProcess", "RouterSpec"]


@dataclass(frozen=True, kw_only=True)
class _Make:
    """The names that one make of router has for what both have (vllm-router 0.1.17, sglang-router 0.3.2)."""

    module: str
    recipe: Recipe
    policy: str
    pools: str
    warnings: str
    more: tuple[str, ...] = ()


_MAKES = {
    "vllm": _Make(
        module="vllm_router.launch_router",
        recipe=VLLM_ROUTER,
        policy="consistent_hash",
        pools="--vllm-pd-disaggregation",  # prefill first, then decode with what vLLM's connector handed on
        warnings="warning",
    ),
    # vLLM's asks pools one after the other, and drops fields of `/generate`: sampling_seed, min_new_tokens
    "sglang": _Make(
        module="sglang_router.launch_router",
        recipe=SGLANG_ROUTER,
        policy="manual",  # by routing key; a request without one goes anywhere
        pools="--pd-disaggregation",  # both at once, with the host, the port and the room where they meet
        warnings="warn",
        more=("--disable-retries",),  # it would ask five times by itself; our client has its own rules
    ),
}
"""Routers by the kind of engine that they are made for; other kinds get vLLM's."""


@dataclass(frozen=True, kw_only=True)
class RouterSpec(ServerSpec):
    """The settings and the command line of a router; see `ServerSpec` for the common ones.

    Attributes:
        workers: base addresses of regular engines, registered at the start. More can be added later.
        prefill: base addresses of prefill engines, or pairs of address and bootstrap port. Static.
        decode: base addresses of decode engines. Static.
        kind: of the engines, as in `EngineInfo`.
        make: ``"vllm"`` or ``"sglang"``: whose router it is; None takes the one for ``kind``.
        health_route: where it asks engines for their health; None for ``/health``.
        host: address to listen on.
        policy: ``consistent_hash``, ``sticky_least_loaded``, ``cache_aware``, ``round_robin``, ...; None takes the
            first, or ``manual`` for SGLang's router: with either, a session stays on one engine.
        request_timeout_s: deadline of a request through the router, pauses of its engine included, in seconds.
        extra_args: more arguments for the router.
        report: takes a line of progress at a time while an environment is made.
    """

    name: ClassVar[str] = "router"
    health: ClassVar[str] = "/liveness"

    workers: Sequence[str] = field(default=(), kw_only=False)
    prefill: Sequence[str | tuple[str, int]] = ()
    decode: Sequence[str] = ()
    kind: str = "vllm"
    make: str | None = None
    health_route: str | None = None
    host: str = "127.0.0.1"
    policy: str | None = None
    request_timeout_s: int = 1800
    extra_args: Sequence[str] = ()
    report: Callable[[str], None] = to_stderr
    start_timeout_s: float = 60.0

    def check(self) -> None:
        if self.make not in (None, *_MAKES):
            raise ConfigError(f"there is no router of make {self.make!r}", expected=f"one of {', '.join(_MAKES)}")
        given = {"regular": self.workers, "prefill": self.prefill, "decode": self.decode}
        check_pools("a router", [worker_type for worker_type, urls in given.items() if urls])

    def interpreter(self) -> Path:
        return self._make.recipe.python(self.report)

    def command(self, python: Path, port: int) -> list[str]:
        arguments = {
            "host": self.host,
            "port": port,
            "policy": self.policy or self._make.policy,
            "prometheus-port": free_port(),  # two routers would share its default
            "request-timeout-secs": self.request_timeout_s,
            "health-check-interval-secs": 10,
            "health-check-endpoint": self.health_route,
            "worker-startup-timeout-secs": max(1, int(self.start_timeout_s)),
            "worker-startup-check-interval": 1,
            "log-level": self._make.warnings,
        }
        command = [str(python), "-m", self._make.module, *as_flags(arguments)]
        command += ["--disable-circuit-breaker", *self._make.more, *self.extra_args]
        command += [self._make.pools] if self.prefill else []
        for worker in self.prefill:
            command += ["--prefill", *([worker] if isinstance(worker, str) else map(str, worker))]
        for url in self.decode:
            command += ["--decode", url]
        return command + (["--worker-urls", *self.workers] if self.workers else [])

    def variables(self, python: Path, command: Sequence[str]) -> dict[str, str]:
        return {}

    @property
    def _make(self) -> _Make:
        return _MAKES[self.make or (self.kind if self.kind in _MAKES else "vllm")]


class RouterProcess(Server):
    """Starts a router and waits until it is healthy; takes the fields of `RouterSpec` as arguments.

    Requests of one session stay on one engine: vLLM's router knows them by ``X-Session-ID``, SGLang's by
    ``X-SMG-Routing-Key``, and our clients send both. SGLang engines get SGLang's router, all others vLLM's. Either
    comes from this environment where it is installed, else from one made on first use.

    With ``make="vllm"`` SGLang engines lose the seeds and least lengths of requests, since vLLM's router drops these
    fields, and their pools do not work.

    Its circuit breaker is off: an engine that is paused for new weights is slow, not broken. It leaves out an engine
    whose health route failed three times, ten seconds apart; which others are in service is decided where the engines'
    weights are known (`torchrl_ext.serving.routing`).
    """

    spec = RouterSpec
