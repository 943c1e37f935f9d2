"""`LocalLauncher` starts planned engines as processes on this machine."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.base.registry import engines
from torchrl_ext.control.serving.processes import GuardedProcess
from torchrl_ext.control.serving.server import EngineSpec, start
from torchrl_ext.control.serving.topology import EnginePlan

__all__ = ["LocalLauncher"]


class LocalLauncher:
    """Starts engines as processes on this machine, each with its own devices.

    Overrides that name a field of the engine's spec set that field; others become arguments of the server. A plan's
    device numbers index the devices of this process: if its ``CUDA_VISIBLE_DEVICES`` is ``4,5``, device 0 is GPU 4.
    Without any, as on a machine without GPUs, a plan's numbers count workers and nothing is pinned.

    Args:
        log_folder: directory for one log file per engine; None uses temporary files.
        api_key: the key that engines require; with None they serve anyone who can reach 127.0.0.1, or their ``host``.
            Engines get it in the environment; SGLang, which has no variable for it, in a file of this user alone.
        settings: fields of every engine's spec, such as ``dtype`` or ``python``; a plan's overrides take precedence.
    """

    def __init__(
        self,
        *,
        log_folder: str | Path | None = None,
        api_key: str | None = None,
        **settings: Any,
    ) -> None:
        self.api_key = api_key
        self._log_folder = None if log_folder is None else Path(log_folder)
        self._settings = settings

    def launch(self, plan: EnginePlan, *, cancel: threading.Event | None = None) -> GuardedProcess:
        """Start an engine and wait until it is healthy.

        Args:
            plan: the engine to start.
            cancel: another thread sets it to cancel the start, which then raises soon.

        Raises:
            ConfigError: the plan cannot work here.
            EngineError, DeadlineError: the engine ended while starting, or the start was cancelled or timed out.
        """
        make: type[EngineSpec] = engines.part(plan.kind, "server")
        try:
            wanted: dict[str, Any] = {**self._settings, **make.role(plan.worker_type), **plan.overrides}
            environ = _pinned(plan)
            if self.api_key is not None and make.key_variable is not None:
                environ[make.key_variable] = self.api_key
            elif self.api_key is not None:
                wanted.setdefault("api_key", self.api_key)
            wanted["environ"] = {**environ, **wanted.get("environ", {})}
            if self._log_folder is not None:
                self._log_folder.mkdir(parents=True, exist_ok=True)
                wanted.setdefault("log_path", self._log_folder / f"{plan.name.replace('/', '-')}.log")
            if "tensor_parallel_size" in make.settings():
                wanted.setdefault("tensor_parallel_size", len(plan.gpus))
            elif len(plan.gpus) > 1:
                raise ConfigError(f"an engine of kind {plan.kind!r} has one worker", expected="one GPU each")
            spec = make(plan.model_path, cancel=cancel, **_fields(make, wanted))
        except ConfigError as error:
            raise ConfigError(
                f"{plan.name}: {error.what}", expected=error.expected, state="it was not started", hint=error.hint
            ) from None
        return start(spec)


def _pinned(plan: EnginePlan) -> dict[str, str]:
    """Return ``CUDA_VISIBLE_DEVICES`` for a plan's engine; empty if this process sees no device."""
    count, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(count)) if visible is None else (name.strip() for name in visible.split(","))
    devices = tuple(names)[:count]
    if not devices:
        return {}
    beyond = [number for number in plan.gpus if number >= len(devices)]
    if beyond:
        raise ConfigError(
            f"it needs device {beyond[0]} of the job",
            expected=f"one of the {len(devices)} that the launcher has: CUDA_VISIBLE_DEVICES={','.join(devices)}",
            hint="let the job see more devices, or plan with fewer",
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[number] for number in plan.gpus)}


def _fields(make: type[EngineSpec], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec's fields; settings that are not fields become ``extra_args``."""
    known = make.settings()
    found = {name: value for name, value in wanted.items() if name in known}
    others = {name: value for name, value in wanted.items() if name not in known}
    if others and "extra_args" not in known:
        raise ConfigError(
            f"an engine of kind {make.name!r} has no setting {', '.join(sorted(others))}",
            expected=f"some of {', '.join(known)}",
        )
    words = [word for name, value in others.items() for word in _argument(make, name, value)]
    return {**found, "extra_args": (*found.get("extra_args", ()), *words)} if words else found


def _argument(make: type[EngineSpec], name: str, value: Any) -> list[str]:
    """Return command-line words: ``swap_space=4`` gives ``--swap-space 4``, ``x=True`` gives ``--x``, None nothing."""
    flag = name.replace("_", "-")
    if value is False and not make.negates:
        raise ConfigError(
            f"an engine of kind {make.name!r} has no argument that makes {name} false",
            expected="true, or another value",
            hint="leave it out, so that the engine's own default applies",
        )
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    words = value if isinstance(value, (list, tuple)) else [json.dumps(value) if isinstance(value, dict) else value]
    return [] if value is None else [f"--{flag}", *map(str, words)]
