"""Hydra groups by transport name, in the ConfigStore beside TorchRL's own. Importing `torchrl_ext.configs` adds them::

    import torchrl_ext.configs  # in the script that has @hydra.main

    trainer.py weight_sync_scheme=delta weight_sync_scheme.root=/shared/updates
    trainer.py weight_updater=transport weight_updater.transport=disk weight_updater.engine=[host1:8000]

TorchRL adds its groups the same way; ours come with them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import MISSING, replace
from typing import Any

from torchrl_ext.collectors.scheme import TransportWeightSyncScheme
from torchrl_ext.configs.build import transport_weight_updater
from torchrl_ext.configs.derived import Parameter, make_config, parameters
from torchrl_ext.errors import ConfigError
from torchrl_ext.registry import transports

try:
    import torchrl.trainers.algorithms.configs  # noqa: F401 - adds TorchRL's groups
    from hydra.core.config_store import ConfigStore
except ImportError as error:
    raise ConfigError(
        f"hydra groups need hydra-core: {error}", hint="pip install 'torchrl_ext[hydra]', or hydra-core and omegaconf"
    ) from error

__all__ = ["register", "scheme_config", "scheme_parameters", "updater_config", "updater_parameters"]

_SET_BY_THE_SCHEME = {"master_address", "rank", "world_size", "vllm_engine"}


def scheme_parameters(transport: str) -> tuple[Parameter, ...]:
    """The settings of ``weight_sync_scheme=<transport>``: the scheme's own first, then the transport's.

    Raises:
        ConfigError: no such transport, or its imports fail.
    """
    own = {field.name: field for field in parameters(TransportWeightSyncScheme)}
    own["transport"] = replace(own["transport"], default=transport)
    moved = [field for field in parameters(transports.load(transport)) if field.name not in own]
    return (*own.values(), *(_optional(field) for field in moved if field.name not in _SET_BY_THE_SCHEME))


def scheme_config(transport: str) -> type[Any]:
    """The config dataclass of ``weight_sync_scheme=<transport>``."""
    return _node(f"{transport}_scheme", TransportWeightSyncScheme, scheme_parameters(transport), partial=False)


def updater_parameters() -> tuple[Parameter, ...]:
    """The settings of ``weight_updater=transport``: every transport's, None where the transport's default is meant."""
    takers: dict[str, list[tuple[str, Parameter]]] = defaultdict(list)
    for name, fields in _known().items():
        for field in fields:
            takers[field.name].append((name, field))
    rows = list(parameters(transport_weight_updater))
    for name, found in takers.items():
        kinds = {field.type for _, field in found}
        kind = kinds.pop() if len(kinds) == 1 else Any
        texts = list(dict.fromkeys(field.help for _, field in found))
        users = ", ".join(transport for transport, _ in found)
        rows.append(_optional(Parameter(name, kind, MISSING, f"({users}) {texts[0]}")))
    return tuple(rows)


def updater_config() -> type[Any]:
    """The config dataclass of ``weight_updater=transport``."""
    return _node("transport_updater", transport_weight_updater, updater_parameters(), partial=True)


def register() -> None:
    """Add the groups. Call it again after another transport was registered.

    A transport whose imports fail on this machine gets no group.
    """
    store = ConfigStore.instance()
    for name in _known():
        store.store(group="weight_sync_scheme", name=name, node=scheme_config(name), provider="torchrl_ext")
    store.store(group="weight_updater", name="transport", node=updater_config(), provider="torchrl_ext")


def _known() -> dict[str, tuple[Parameter, ...]]:
    """The transports that can be imported here, with their parameters."""
    known = {}
    for name in transports.names():
        try:
            known[name] = parameters(transports.load(name))
        except ConfigError:
            continue
    return known


def _optional(field: Parameter) -> Parameter:
    """A required parameter as one that may be left to the scheme."""
    if not field.required:
        return field
    return replace(field, type=field.type if field.type is Any else field.type | None, default=None)


def _node(title: str, target: Any, fields: tuple[Parameter, ...], *, partial: bool) -> type[Any]:
    """A config dataclass that `hydra.utils.instantiate` turns into a call of ``target`` with plain containers."""
    calls = (
        Parameter("_target_", str, f"{target.__module__}.{target.__qualname__}"),
        Parameter("_partial_", bool, partial),
        Parameter("_convert_", str, "all"),
    )
    return make_config(title, (*calls, *fields))


register()
