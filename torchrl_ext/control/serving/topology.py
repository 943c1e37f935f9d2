"""Read the YAML file that plans a training job's engines: models, server groups, devices, overrides.

The keys and their resolution are those of the options ``--vllm-config`` and ``--sglang-config`` of the seeds::

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
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.base.registry import engines
from torchrl_ext.base.types import described

__all__ = ["EnginePlan", "ModelPlan", "Topology", "check_pools"]

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
    server_groups: list[_Group] | None = None
    engine_groups: list[_Group] | None = None


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
        overrides: fields of the engine's spec or arguments of its server, with underscores.
    """

    name: str
    kind: str
    worker_type: str
    model_path: str
    gpus: tuple[int, ...]
    overrides: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """The plan of one model with its engines and its own router.

    Attributes:
        name: the job's name for the model.
        update_weights: whether the model follows the trainer; if not, its engines never get a weight call.
        engines: empty for only a router.
    """

    name: str
    update_weights: bool
    engines: tuple[EnginePlan, ...]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The plans of all models that a job starts, in the order of the file; all engines are of one kind."""

    kind: str
    models: tuple[ModelPlan, ...]

    @classmethod
    def load(cls, path: str | Path, **settings: Any) -> Topology:
        """Read a YAML file and `parse` its content.

        Raises:
            ConfigError: PyYAML is not installed, the file cannot be read, is not YAML, or its content cannot work.
        """
        try:
            import yaml
        except ModuleNotFoundError:
            raise ConfigError.missing("PyYAML", "cli") from None
        try:
            return cls.parse(yaml.safe_load(Path(path).read_text()), **settings)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} cannot be read: {error}", expected="a YAML file") from None
        except ConfigError as error:
            raise ConfigError(
                f"{path}: {error.what}", expected=error.expected, state="nothing was started", hint=error.hint
            ) from None

    @classmethod
    def parse(cls, content: Any, *, hf_checkpoint: str | Path | None = None) -> Topology:
        """Resolve the content of a file into plans.

        Args:
            content: ``{"vllm": [model, ...]}``, or another kind of engine that has a server.
            hf_checkpoint: the trainer's initial checkpoint. Models without ``model_path`` use it; a model with
                ``update_weights: auto`` follows the trainer if its path is this one.

        Raises:
            ConfigError: the content cannot work.
        """
        try:
            ((kind, rows),) = msgspec.convert(content, described(_Models)).items()
        except msgspec.ValidationError as error:
            raise ConfigError(f"the models cannot be read: {error}", hint="docs/operations.md lists the keys") from None
        engines.part(kind, "server")  # raises for a kind without a server, and lists those with one
        if len({row.name for row in rows}) < len(rows):
            raise ConfigError(f"two models have one name: {', '.join(row.name for row in rows)}")
        devices = itertools.count()
        models = tuple(_planned(kind, row, hf_checkpoint, devices) for row in rows)
        return cls(kind=kind, models=models)


def _planned(kind: str, row: _Model, hf_checkpoint: str | Path | None, devices: Iterator[int]) -> ModelPlan:
    """Return a model's plan; its engines get the next ``devices``."""
    name, default = row.name, row.model_path or str(hf_checkpoint or "")
    if row.server_groups is not None and row.engine_groups is not None:
        raise ConfigError(
            f"model {name!r} has both server_groups and engine_groups", expected="one of them, since they mean the same"
        )
    plans: list[EnginePlan] = []
    for group in row.server_groups or row.engine_groups or []:
        overrides = {key.replace("-", "_"): value for key, value in (group.overrides or {}).items()}
        path = str(overrides.pop("model_path", default))
        each = group.num_gpus_per_engine or row.num_gpus_per_engine or 1
        mine = tuple(itertools.islice(devices, group.num_gpus))
        if len(mine) % each:
            raise ConfigError(f"a group of {name!r} has {len(mine)} GPUs for engines of {each}", expected="a multiple")
        if not path:
            raise ConfigError(f"model {name!r} has no model_path", hint="give one, or hf_checkpoint")
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
    types = {plan.worker_type for plan in plans}
    check_pools(f"model {name!r}", types)
    paths = sorted({plan.model_path for plan in plans}) or [default]
    if len(paths) > 1:
        raise ConfigError(f"groups of {name!r} have different paths: {', '.join(paths)}", expected="one model")
    follows = row.update_weights
    if follows == "auto":
        follows = hf_checkpoint is not None and os.path.abspath(paths[0]) == os.path.abspath(hf_checkpoint)
        if not follows:
            words = "model %r does not follow the trainer: its path %r is not the trainer's %r"
            log.warning(words, name, paths[0], hf_checkpoint)
    return ModelPlan(name=name, update_weights=follows, engines=tuple(plans))


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
