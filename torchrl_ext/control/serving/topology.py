"""A training job's models and engines: planned in a YAML file, started or found, and served behind routers.

The keys and their resolution are those of vime's ``--vllm-config`` and slime's ``--sglang-config``::

    vllm:
      - name: actor
        server_groups:
          - {worker_type: regular, num_gpus: 4, num_gpus_per_engine: 2, overrides: {max-model-len: 4096}}
      - name: reward
        model_path: /models/reward
        update_weights: false
        server_groups:
          - {worker_type: regular, num_gpus: 1}
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from torchrl_ext.base.devices import visible_devices
from torchrl_ext.base.errors import ConfigError
from torchrl_ext.base.registry import engines
from torchrl_ext.control.discovery import discover
from torchrl_ext.control.serving.processes import GuardedProcess, stop_all, wait_until_healthy
from torchrl_ext.control.serving.routing import Routing
from torchrl_ext.control.serving.server import EngineSpec, check_pools

__all__ = ["EnginePlan", "ModelPlan", "OwnedEngines", "Serving", "parse_plans", "read_plans"]

log = logging.getLogger("torchrl_ext")

_Count = Annotated[int, msgspec.Meta(ge=1)]


class _Group(msgspec.Struct, forbid_unknown_fields=True):
    worker_type: Literal["regular", "prefill", "decode"]
    num_gpus: _Count
    num_gpus_per_engine: _Count | None = None
    overrides: dict[str, Any] | None = None


class _Model(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    model_path: str | None = None
    num_gpus_per_engine: _Count | None = None
    update_weights: bool | Literal["auto"] = "auto"
    server_groups: list[_Group] = []
    engine_groups: list[_Group] = []


_Models = Annotated[
    dict[str, Annotated[list[_Model], msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1, max_length=1)
]


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """The plan of one engine: what to start, and on which devices.

    Attributes:
        name: ``model/worker type/number``.
        kind: a kind of engine that has a server, such as ``"vllm"``.
        worker_type: ``"regular"``, ``"prefill"`` or ``"decode"``.
        gpus: device numbers, counted over the whole job.
        overrides: fields of the engine's spec or arguments of its server, with underscores (`EngineSpec.of`).
    """

    name: str
    kind: str
    worker_type: str
    model_path: str
    gpus: tuple[int, ...]
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def spec(self, settings: Mapping[str, Any], *, log_folder: str | Path | None = None) -> EngineSpec:
        """Return what the engine is started with on this machine; the arguments are as for `OwnedEngines`.

        Raises:
            ConfigError: the plan cannot work here.
        """
        make: type[EngineSpec] = engines.part(self.kind, "server")
        try:
            wanted: dict[str, Any] = {**settings, **make.role(self.worker_type), **self.overrides}
            wanted["environ"] = {**_pinned(self), **wanted.get("environ", {})}
            if log_folder is not None:
                wanted.setdefault("log_path", Path(log_folder) / f"{self.name.replace('/', '-')}.log")
            if "tensor_parallel_size" in make.settings():
                wanted.setdefault("tensor_parallel_size", len(self.gpus))
            elif len(self.gpus) > 1:
                raise ConfigError(f"an engine of kind {self.kind!r} has one worker", expected="one GPU each")
            return make.of(self.model_path, wanted)
        except ConfigError as error:
            raise ConfigError(
                f"{self.name}: {error.what}", expected=error.expected, state="nothing was started", hint=error.hint
            ) from None


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """The plan of one model with its engines and its own router.

    Attributes:
        name: the job's name for the model.
        kind: the kind of its engines, which has a server, such as ``"vllm"``.
        update_weights: whether the model follows the trainer; if not, its engines never get a weight call.
        engines: empty for only a router.
    """

    name: str
    kind: str
    update_weights: bool
    engines: tuple[EnginePlan, ...]


def read_plans(path: str | Path, *, hf_checkpoint: str | Path | None = None) -> tuple[ModelPlan, ...]:
    """Return `parse_plans` of a YAML file.

    Raises:
        ConfigError: PyYAML is not installed, the file cannot be read, is not YAML, or its content cannot work.
    """
    try:
        import yaml
    except ModuleNotFoundError:
        raise ConfigError.missing("PyYAML", "cli") from None
    try:
        return parse_plans(yaml.safe_load(Path(path).read_text()), hf_checkpoint=hf_checkpoint)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", expected="a YAML file") from None
    except ConfigError as error:
        raise ConfigError(
            f"{path}: {error.what}", expected=error.expected, state="nothing was started", hint=error.hint
        ) from None


def parse_plans(content: Any, *, hf_checkpoint: str | Path | None = None) -> tuple[ModelPlan, ...]:
    """Resolve the content of a file into the plans of its models, in its order.

    Args:
        content: ``{"vllm": [model, ...]}``, or another kind of engine that has a server.
        hf_checkpoint: the trainer's initial checkpoint. Models without ``model_path`` use it; a model with
            ``update_weights: auto`` follows the trainer if its path is this one.

    Raises:
        ConfigError: the content cannot work.
    """
    try:
        ((kind, rows),) = msgspec.convert(content, _Models).items()
    except msgspec.ValidationError as error:
        raise ConfigError(f"the models cannot be read: {error}", hint="docs/start_engine.md lists the keys") from None
    engines.part(kind, "server")  # raises for a kind without a server, and lists those with one
    if len({row.name for row in rows}) < len(rows):
        raise ConfigError(f"two models have one name: {', '.join(row.name for row in rows)}", hint="rename one")
    devices = itertools.count()
    return tuple(_planned(kind, row, hf_checkpoint, devices) for row in rows)


def _planned(kind: str, row: _Model, hf_checkpoint: str | Path | None, devices: Iterator[int]) -> ModelPlan:
    """Return a model's plan; its engines get the next ``devices``."""
    name, default = row.name, row.model_path or str(hf_checkpoint or "")
    plans: list[EnginePlan] = []
    if row.server_groups and row.engine_groups:
        raise ConfigError(f"model {name!r} has server_groups and engine_groups", expected="one: they mean the same")
    for group in row.server_groups or row.engine_groups:
        overrides = {key.replace("-", "_"): value for key, value in (group.overrides or {}).items()}
        path = str(overrides.pop("model_path", default))
        if not path:
            raise ConfigError(f"model {name!r} has no model_path", hint="give one, or hf_checkpoint")
        each = group.num_gpus_per_engine or row.num_gpus_per_engine or 1
        mine = tuple(itertools.islice(devices, group.num_gpus))
        if len(mine) % each:
            raise ConfigError(f"a group of {name!r} has {len(mine)} GPUs for engines of {each}", expected="a multiple")
        before = sum(plan.worker_type == group.worker_type for plan in plans)
        plans += [
            EnginePlan(
                name=f"{name}/{group.worker_type}/{before + first // each}",
                kind=kind,
                worker_type=group.worker_type,
                model_path=path,
                gpus=mine[first : first + each],
                overrides=overrides,
            )
            for first in range(0, len(mine), each)
        ]
    check_pools(f"model {name!r}", {plan.worker_type for plan in plans})
    path, *others = sorted({plan.model_path for plan in plans}) or [default]
    if others:
        raise ConfigError(f"groups of {name!r} have different paths: {path}, {', '.join(others)}", expected="one model")
    follows = row.update_weights
    if follows == "auto":
        follows = hf_checkpoint is not None and os.path.abspath(path) == os.path.abspath(hf_checkpoint)
        if not follows:
            words = "model %r does not follow the trainer: its path %r is not the trainer's %r"
            log.warning(words, name, path, hf_checkpoint)
    return ModelPlan(name=name, kind=kind, update_weights=follows, engines=tuple(plans))


class Serving:
    """Holds a job's models by name, each behind a router; a context manager that ends its routers and engines.

    Attributes:
        engines: the processes of owned engines, by the names of their plans.
        models: the routing of each model, by name; running engines are one model (`Routing.over`).
    """

    def __init__(self, **models: Routing) -> None:
        self.engines: dict[str, GuardedProcess] = {}
        self.models = models

    def model(self, name: str) -> Routing:
        """Return the routing of the model called ``name``; ConfigError, which lists the names, if there is none."""
        if name not in self.models:
            raise ConfigError(f"there is no model called {name!r}", expected=f"one of {', '.join(self.models)}")
        return self.models[name]

    def shutdown(self) -> None:
        """End our routers and engines. May be called twice."""
        for model in self.models.values():  # routers first
            model.close()
        stop_all(self.engines.values())

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()


def OwnedEngines(
    models: Sequence[ModelPlan] | str | Path,
    *,
    hf_checkpoint: str | Path | None = None,
    api_key: str | None = None,
    log_folder: str | Path | None = None,
    router: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Serving:
    """Start the engines and routers of models on this machine, which the returned `Serving` ends.

    Each engine has its own devices. A plan's device numbers index those of this process: if its
    ``CUDA_VISIBLE_DEVICES`` is ``4,5``, device 0 is GPU 4. Without any, as on a machine without GPUs, a plan's numbers
    count workers and nothing is pinned. Once one engine cannot be started, the others are ended.

    Args:
        models: plans, or the path of their YAML file (then with ``hf_checkpoint``).
        hf_checkpoint: see `parse_plans`.
        api_key: the key that engines require; with None they serve anyone who can reach 127.0.0.1, or their ``host``.
            Engines get it in the environment; SGLang, which has no variable for it, in a file of this user alone.
        log_folder: directory for one log file per engine; None uses temporary files.
        router: settings of each `RouterProcess`, such as ``policy``, and ``api_key`` if engines require another key; or
            ``{"router": address}`` of a running router, for a single model.
        settings: of every engine, such as ``dtype`` or ``python``; a plan's overrides take precedence.

    Raises:
        ConfigError, EngineError, DeadlineError: something could not be started; everything else was ended.
    """
    if isinstance(models, (str, Path)):
        models = read_plans(models, hf_checkpoint=hf_checkpoint)
    routers = {"api_key": api_key, **(router or {})}
    if "router" in routers and len(models) > 1:
        raise ConfigError(
            f"{', '.join(model.name for model in models)} each need a router, but only one is given",
            state="nothing was started",
            hint="leave it out",
        )
    plans = [plan for model in models for plan in model.engines]
    specs = {plan.name: plan.spec({"api_key": api_key, **settings}, log_folder=log_folder) for plan in plans}
    if log_folder is not None:
        Path(log_folder).mkdir(parents=True, exist_ok=True)
    serving = Serving()
    try:
        for name, spec in specs.items():
            serving.engines[name] = GuardedProcess(spec)
        wait_until_healthy(serving.engines.values())
        for model in models:
            serving.models[model.name] = _routed(model, serving.engines, routers)
    except BaseException:
        serving.shutdown()
        raise
    return serving


def _pinned(plan: EnginePlan) -> dict[str, str]:
    """Return the variable of the devices that a plan's engine sees; empty if this process sees none."""
    variable, devices = visible_devices()
    if not devices:
        return {}
    beyond = [number for number in plan.gpus if number >= len(devices)]
    if beyond:
        raise ConfigError(
            f"it needs device {beyond[0]} of the job",
            expected=f"one of the {len(devices)} that the launcher has: {variable}={','.join(devices)}",
            hint="let the job see more devices, or plan with fewer",
        )
    return {variable: ",".join(devices[number] for number in plan.gpus)} if variable else {}


def _routed(model: ModelPlan, processes: Mapping[str, GuardedProcess], settings: Mapping[str, Any]) -> Routing:
    urls = [processes[plan.name].url for plan in model.engines]
    infos = discover(*urls, api_key=settings["api_key"]) if urls else []
    own = {} if "router" in settings else {"kind": model.kind}
    follows = model.update_weights and bool(infos)
    return Routing(infos, name=model.name, update_weights=follows, **{**own, **settings})
