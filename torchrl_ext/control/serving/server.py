"""Settings of engines and routers, one class per kind of server, which turn them into a command line and variables."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from torchrl_ext.base.devices import accelerator
from torchrl_ext.base.errors import ConfigError
from torchrl_ext.base.registry import engines
from torchrl_ext.control.serving.processes import GuardedProcess, ServerSpec, free_port, stop_all, wait_until_healthy

__all__ = ["EngineSpec", "RouterProcess", "RouterSpec", "as_flags", "check_pools", "start"]


@dataclass(frozen=True, kw_only=True)
class EngineSpec(ServerSpec):
    """The settings that engines share, for one model.

    Attributes:
        probe: route that a router checks if the engine has no key; it answers 200 while the engine is paused.
        model_dir: Hugging Face checkpoint directory.
        dtype: ``"auto"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        max_model_len: maximum tokens of a sequence, prompt included; None uses the model's limit.
        tensor_parallel_size: workers that share the model.
        cpu: whether the server computes on the CPU; None does so if this process sees no GPU.
        sleep_mode: let the server release device memory; no effect on a CPU.
        api_key: the key that the server requires; never on a command line, which everybody can read.
    """

    probe: ClassVar[str] = "/health"

    model_dir: str | Path = field(kw_only=False)
    dtype: str = "auto"
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    cpu: bool | None = None
    sleep_mode: bool = False
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def settings(cls) -> tuple[str, ...]:
        """Return the names of the fields that can be set."""
        return tuple(one.name for one in fields(cls) if one.init)

    @classmethod
    def role(cls, worker_type: str) -> dict[str, Any]:
        """Return the settings for a worker type (pools on GPUs over NIXL are untested).

        Args:
            worker_type: ``"regular"``, ``"prefill"`` or ``"decode"``.
        """
        return {}

    @classmethod
    def of(cls, model_dir: str | Path, settings: Mapping[str, Any]) -> EngineSpec:
        """Return the spec with these settings; those that are no fields become arguments of the server.

        ``swap_space=4`` gives ``--swap-space 4``, ``x=True`` gives ``--x``, False ``--no-x``, and None nothing.

        Raises:
            ConfigError: this kind of engine cannot be given a setting.
        """
        known = cls.settings()
        found = {name: value for name, value in settings.items() if name in known}
        others = {name: value for name, value in settings.items() if name not in known}
        if others and "extra_args" not in known:
            raise ConfigError(
                f"an engine of kind {cls.name!r} has no setting {', '.join(sorted(others))}",
                expected=f"some of {', '.join(known)}",
            )
        if others:
            words = [word for name, value in others.items() for word in _argument(name.replace("_", "-"), value)]
            found["extra_args"] = (*found.get("extra_args", ()), *words)
        return cls(model_dir, **found)

    def check(self) -> None:
        if not self.model.is_dir():
            raise ConfigError(f"{self.model_dir} is not a directory", expected="a Hugging Face checkpoint directory")
        super().check()

    @property
    def model(self) -> Path:
        """The absolute path of the checkpoint."""
        return Path(self.model_dir).absolute()

    @property
    def on_cpu(self) -> bool:
        """Whether the server computes on the CPU."""
        return not accelerator() if self.cpu is None else self.cpu


def _argument(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    words = value if isinstance(value, (list, tuple)) else [json.dumps(value) if isinstance(value, dict) else value]
    return [] if value is None else [f"--{flag}", *map(str, words)]


def start(spec: ServerSpec) -> GuardedProcess:
    """Start a server as a child process and wait until it is healthy.

    Raises:
        ConfigError, EngineError, DeadlineError: as for `GuardedProcess`, and for its `healthy`; the server was ended.
    """
    server = GuardedProcess(spec)
    try:
        wait_until_healthy([server])
    except BaseException:
        stop_all([server])
        raise
    return server


def as_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return ``--name=value`` for each argument that is not None."""
    return [f"--{name}={value}" for name, value in arguments.items() if value is not None]


def check_pools(whose: str, types: Collection[str]) -> None:
    """Check that one router can serve these worker types together.

    Raises:
        ConfigError: one pool lacks the other, or pools are mixed with regular engines; the error starts with ``whose``.
    """
    pools = {"prefill", "decode"}.intersection(types)
    if len(pools) == 1:
        raise ConfigError(f"{whose} has {pools.pop()} engines only", expected="prefill and decode engines")
    if pools and "regular" in types:
        raise ConfigError(
            f"{whose} has both pools and regular engines", expected="one or the other", hint="two routers"
        )


@dataclass(frozen=True, kw_only=True)
class RouterSpec(ServerSpec):
    """The settings of a router.

    The circuit breaker is off: an engine that is paused for new weights is slow, not broken. The router leaves out an
    engine whose health route failed three times, ten seconds apart; `torchrl_ext.control.serving.routing`, which knows
    the engines' weights, decides which other engines are in service.

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
    policy: str | None = None
    request_timeout_s: int = 1800
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


def RouterProcess(workers: Sequence[str] = (), *, kind: str = "vllm", **settings: Any) -> GuardedProcess:
    """Start the router of a make of engines and wait until it is healthy; raises as `start`.

    A session's requests stay on one engine: vLLM's router identifies the session by ``X-Session-ID``, SGLang's by
    ``X-SMG-Routing-Key``; our clients send both.

    Args:
        workers: base addresses of regular engines.
        kind: kind of the engines, as in `EngineInfo`.
        settings: further fields of `RouterSpec`.
    """
    return start(engines.part(kind, "router")(workers, **settings))
