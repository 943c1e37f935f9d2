"""Read the YAML file of the engines that a training job owns: models, groups of servers, devices, overrides.

Source of the keys and of how they are resolved: ``--vllm-config`` of vime and ``--sglang-config`` of slime::

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

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrl_ext.errors import ConfigError

__all__ = ["EnginePlan", "ModelPlan", "Topology", "check_pools"]

log = logging.getLogger("torchrl_ext")

KINDS = ("vllm", "sglang", "embedded")
TYPES = ("regular", "prefill", "decode", "placeholder", "encoder")
_MODEL_KEYS = {"name", "model_path", "num_gpus_per_engine", "update_weights", "server_groups", "engine_groups"}
_GROUP_KEYS = {"worker_type", "num_gpus", "num_gpus_per_engine", "overrides"}


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """The plan of one engine: what to start, and on which devices.

    Attributes:
        name: ``model/worker type/number``.
        model: name of its model.
        kind: ``"vllm"``, ``"sglang"`` or ``"embedded"``.
        worker_type: ``"regular"``, ``"prefill"``, ``"decode"`` or ``"encoder"``.
        model_path: checkpoint directory.
        gpus: numbers of its devices, counted over the whole job.
        overrides: settings of the launcher or arguments of the server, with underscores.
    """

    name: str
    model: str
    kind: str
    worker_type: str
    model_path: str
    gpus: tuple[int, ...]
    overrides: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """The plan of one model with its engines, which get a router of their own.

    Attributes:
        name: how the job calls it.
        model_path: checkpoint directory.
        update_weights: whether it follows the trainer. Engines of a model that does not never get a weight call.
        engines: encoders first, since others are told their addresses; none for a router alone.
    """

    name: str
    model_path: str
    update_weights: bool
    engines: tuple[EnginePlan, ...]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The plans of all models that a job starts.

    Attributes:
        kind: of all engines.
        models: in the order of the file.
        num_gpus: devices in all, placeholders included.
    """

    kind: str
    models: tuple[ModelPlan, ...]
    num_gpus: int

    @classmethod
    def load(cls, path: str | Path, **settings: Any) -> Topology:
        """Read a file and resolve what it says; see `parse`.

        Raises:
            ConfigError: it cannot be read, is no YAML, or says something that cannot work.
        """
        import yaml

        try:
            told = yaml.safe_load(Path(path).read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} cannot be read: {error}", expected="a YAML file") from None
        try:
            return cls.parse(told, **settings)
        except ConfigError as error:
            raise ConfigError(
                f"{path}: {error.what}", expected=error.expected, state="nothing was started", hint=error.hint
            ) from None

    @classmethod
    def parse(
        cls,
        told: Any,
        *,
        hf_checkpoint: str | Path | None = None,
        num_gpus_per_engine: int = 1,
        rollout_num_gpus: int | None = None,
    ) -> Topology:
        """Resolve the content of a file into plans.

        Args:
            told: ``{"vllm": [model, ...]}`` (or ``sglang``, ``embedded``).
            hf_checkpoint: what the trainer starts from: the path of models that give none, and the one that
                ``update_weights: auto`` looks for.
            num_gpus_per_engine: for groups of models that give none.
            rollout_num_gpus: what all groups have to add up to, where given.

        Raises:
            ConfigError: what it says cannot work.
        """
        if not isinstance(told, Mapping) or len(told) != 1 or next(iter(told)) not in KINDS:
            found = list(told) if isinstance(told, Mapping) else type(told).__name__
            raise ConfigError(f"the top level is {found}", expected=f"one key of {', '.join(KINDS)}")
        ((kind, rows),) = told.items()
        if not isinstance(rows, Sequence) or isinstance(rows, str) or not rows:
            raise ConfigError(f"{kind} is {rows!r:.80}", expected="a list of at least one model")
        models, offset = [], 0
        for row in rows:
            default = None if hf_checkpoint is None else str(hf_checkpoint)
            model, offset = _model(kind, row, default, num_gpus_per_engine, offset)
            models.append(model)
        names = [model.name for model in models]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"two models are called {twice[0]!r}")
        if rollout_num_gpus not in (None, offset):
            raise ConfigError(f"the groups have {offset} GPUs in all", expected=f"rollout_num_gpus={rollout_num_gpus}")
        return cls(kind=kind, models=tuple(models), num_gpus=offset)


def _model(kind: str, row: Any, hf_checkpoint: str | None, per_engine: int, offset: int) -> tuple[ModelPlan, int]:
    _keys(row, _MODEL_KEYS, "a model")
    name = row.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"a model's name is {name!r}", expected="a string")
    if "server_groups" in row and "engine_groups" in row:
        raise ConfigError(f"model {name!r} has server_groups and engine_groups", expected="one: they mean the same")
    groups = row.get("server_groups", row.get("engine_groups")) or []
    per_engine = _count(row.get("num_gpus_per_engine", per_engine), f"num_gpus_per_engine of {name!r}")
    paths: set[str] = set()
    engines: list[EnginePlan] = []
    for group in groups:
        _keys(group, _GROUP_KEYS, f"a group of {name!r}")
        overrides = {str(key).replace("-", "_"): value for key, value in (group.get("overrides") or {}).items()}
        path = overrides.pop("model_path", None) or row.get("model_path") or hf_checkpoint
        worker_type = group.get("worker_type")
        if worker_type not in TYPES:
            raise ConfigError(f"a group of {name!r} has worker_type {worker_type!r}", expected=" or ".join(TYPES))
        gpus = _count(group.get("num_gpus"), f"num_gpus of a group of {name!r}")
        each = _count(group.get("num_gpus_per_engine", per_engine), f"num_gpus_per_engine of a group of {name!r}")
        if worker_type != "placeholder":
            if gpus % each:
                raise ConfigError(f"a group of {name!r} has {gpus} GPUs for engines of {each}", expected="a multiple")
            if path is None:
                raise ConfigError(f"model {name!r} has no model_path", hint="give one, or hf_checkpoint")
            paths.add(str(path))
            for i in range(gpus // each):
                number = sum(plan.worker_type == worker_type for plan in engines)
                devices = tuple(range(offset + i * each, offset + (i + 1) * each))
                engines.append(
                    EnginePlan(
                        name=f"{name}/{worker_type}/{number}",
                        model=name,
                        kind=kind,
                        worker_type=worker_type,
                        model_path=str(path),
                        gpus=devices,
                        overrides=overrides,
                    )
                )
        offset += gpus
    if len(paths) > 1:
        raise ConfigError(f"groups of {name!r} have different paths: {', '.join(sorted(paths))}", expected="one model")
    types = {plan.worker_type for plan in engines}
    check_pools(f"model {name!r}", types)
    if types == {"encoder"}:
        raise ConfigError(f"model {name!r} has encoders alone")
    path = paths.pop() if paths else str(row.get("model_path") or hf_checkpoint or "")
    engines.sort(key=lambda plan: plan.worker_type != "encoder")
    updated = _updated(name, row.get("update_weights", "auto"), path, hf_checkpoint)
    return ModelPlan(name=name, model_path=path, update_weights=updated, engines=tuple(engines)), offset


def _updated(name: str, told: Any, path: str, hf_checkpoint: str | None) -> bool:
    if isinstance(told, bool):
        return told
    if told != "auto":
        raise ConfigError(f"update_weights of {name!r} is {told!r}", expected="true, false or auto")
    if hf_checkpoint is not None and path == hf_checkpoint:
        return True
    log.warning("model %r does not follow the trainer: its path %r is not the trainer's %r", name, path, hf_checkpoint)
    return False


def check_pools(whose: str, types: Collection[str]) -> None:
    """Refuse worker types that one router cannot serve together.

    Raises:
        ConfigError: a pool without the other, or pools beside regular engines; the message begins with ``whose``.
    """
    pools = {"prefill", "decode"}.intersection(types)
    if len(pools) == 1:
        raise ConfigError(f"{whose} has {pools.pop()} engines alone", expected="prefill and decode engines")
    if pools and "regular" in types:
        raise ConfigError(f"{whose} has pools and regular engines", expected="one or the other", hint="two routers")


def _keys(row: Any, known: set[str], what: str) -> None:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{what} is {row!r:.80}", expected="a mapping")
    unknown = sorted(set(map(str, row)) - known)
    if unknown:
        raise ConfigError(f"{what} has {', '.join(unknown)}", expected=f"some of {', '.join(sorted(known))}")


def _count(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{what} is {value!r}", expected="a number of at least 1")
    return value
