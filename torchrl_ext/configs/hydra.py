"""Hydra groups by transport name, in the ConfigStore beside TorchRL's own. Importing `torchrl_ext.configs` adds them::

    import torchrl_ext.configs  # in the script that has @hydra.main

    trainer.py weight_sync_scheme=delta weight_sync_scheme.root=/shared/updates
    trainer.py weight_updater=transport weight_updater.transport=disk weight_updater.engine=[host1:8000]

TorchRL adds its groups the same way; ours come with them, and so does ``weight_sync_scheme=sglang``, which it lacks. A
group's settings are read off the constructors, with the types that OmegaConf can check: a path is a string, and what
may have several simple types is `Any`.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from typing import Any

from torchrl_ext.collectors.scheme import TransportWeightSyncScheme, check_settings
from torchrl_ext.compat.torchrl_llm.schemes import SGLangWeightSyncScheme
from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.registry import transports
from torchrl_ext.types import dtype_from_name

try:
    import torchrl.trainers.algorithms.configs  # noqa: F401 - adds TorchRL's groups
    from hydra.core.config_store import ConfigStore
except ImportError as error:
    raise ConfigError(
        f"hydra groups need hydra-core: {error}", hint="pip install 'torchrl_ext[hydra]', or hydra-core and omegaconf"
    ) from error

__all__ = ["Parameter", "parameters", "register", "scheme_parameters", "transport_weight_updater", "updater_parameters"]

_SET_BY_THE_SCHEME = {"master_address", "rank", "world_size", "vllm_engine"}
_SIMPLE = (bool, int, float, str)


@dataclass(frozen=True)
class Parameter:
    """One parameter of a constructor.

    Attributes:
        name: its name.
        type: what OmegaConf checks.
        default: `dataclasses.MISSING` where there is none.
    """

    name: str
    type: Any
    default: Any

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.default is MISSING

    @property
    def type_name(self) -> str:
        """The type as it is written in code."""
        return self.type.__name__ if isinstance(self.type, type) else str(self.type).replace("typing.", "")


def parameters(call: Callable[..., Any]) -> tuple[Parameter, ...]:
    """Return the named parameters of a class or a function, in order."""
    hints = typing.get_type_hints(call.__init__ if inspect.isclass(call) else call)
    return tuple(
        Parameter(
            name,
            _checkable(hints.get(name, Any)),
            MISSING if parameter.default is inspect.Parameter.empty else parameter.default,
        )
        for name, parameter in inspect.signature(call).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    )


def _checkable(hint: Any) -> Any:
    """Return the part of a type that OmegaConf can check; it cannot merge a mapping into an optional typed one."""
    if typing.get_origin(hint) in (Mapping, dict):
        return dict[str, Any]
    members = (hint,) if typing.get_origin(hint) is typing.Literal else typing.get_args(hint) or (hint,)
    simple = {member for member in members if member in _SIMPLE}
    simple |= {type(typing.get_args(member)[0]) for member in members if typing.get_origin(member) is typing.Literal}
    if len(simple) != 1:
        return Any
    (kind,) = simple
    return kind | None if type(None) in members else kind


def scheme_parameters(transport: str) -> tuple[Parameter, ...]:
    """Return the settings of ``weight_sync_scheme=<transport>``: the scheme's own first, then the transport's.

    Raises:
        ConfigError: no such transport, or its imports fail.
    """
    own = {field.name: field for field in parameters(TransportWeightSyncScheme)}
    own["transport"] = replace(own["transport"], default=transport)
    moved = [field for field in parameters(transports.load(transport)) if field.name not in own]
    return (*own.values(), *(_optional(field) for field in moved if field.name not in _SET_BY_THE_SCHEME))


def updater_parameters() -> tuple[Parameter, ...]:
    """Return the settings of ``weight_updater=transport``: those of every transport; None leaves its own default."""
    kinds: dict[str, set[Any]] = defaultdict(set)
    for fields in _known().values():
        for field in fields:
            kinds[field.name].add(field.type)
    rows = list(parameters(transport_weight_updater))
    for name, found in kinds.items():
        kind = found.pop() if len(found) == 1 else Any
        rows.append(_optional(Parameter(name, kind, MISSING)))
    return tuple(rows)


def register() -> None:
    """Add the groups to hydra's ConfigStore. Call it again after another transport was registered.

    A transport whose imports fail on this machine gets no group.
    """
    store = ConfigStore.instance()
    for name in _known():
        node = _node(f"{name}_scheme", TransportWeightSyncScheme, scheme_parameters(name), partial=False)
        store.store(group="weight_sync_scheme", name=name, node=node, provider="torchrl_ext")
    node = _node("sglang_scheme", SGLangWeightSyncScheme, parameters(SGLangWeightSyncScheme), partial=False)
    store.store(group="weight_sync_scheme", name="sglang", node=node, provider="torchrl_ext")
    node = _node("transport_updater", transport_weight_updater, updater_parameters(), partial=True)
    store.store(group="weight_updater", name="transport", node=node, provider="torchrl_ext")


def _known() -> dict[str, tuple[Parameter, ...]]:
    """Return the transports that can be imported here, with their parameters."""
    known = {}
    for name in transports.names():
        try:
            known[name] = parameters(transports.load(name))
        except ConfigError:
            continue
    return known


def _optional(field: Parameter) -> Parameter:
    """Return a required parameter as one that may be left out, with None for a default; others as they are."""
    if not field.required:
        return field
    return replace(field, type=field.type if field.type is Any else field.type | None, default=None)


def _node(title: str, target: Any, fields: tuple[Parameter, ...], *, partial: bool) -> type[Any]:
    """Make a config dataclass that `hydra.utils.instantiate` turns into a call of ``target`` with plain containers."""
    calls = (
        Parameter("_target_", str, f"{target.__module__}.{target.__qualname__}"),
        Parameter("_partial_", bool, partial),
        Parameter("_convert_", str, "all"),
    )
    rows = [(field.name, field.type, dataclasses.field(default=field.default)) for field in (*calls, *fields)]
    return dataclasses.make_dataclass(title, rows, kw_only=True)


def transport_weight_updater(
    transport: str = "disk",
    engine: Any = None,
    mapper: Any = None,
    dtype: str | None = None,
    verify: bool | str = True,
    rehearse: str = "once",
    max_gap: float | str | None = "dtype",
    finite: str = "warn",
    **settings: Any,
) -> Any:
    """Make a `TransportWeightUpdater`, with every setting checked and nothing opened.

    Args:
        transport: name of the transport.
        engine: ``host:port`` of one engine, a list of them, or an engine client; None for the data layer alone.
        mapper: a table of regular expressions, trainer name -> checkpoint name.
        dtype: name of the dtype to which floating-point tensors are cast.
        verify, rehearse, max_gap: what an update has to prove, as for `WeightSender`.
        finite: what becomes of a NaN or an infinity, as for `WeightSender`.
        settings: of the transport; those that are None are left to their defaults.

    Raises:
        ConfigError: no such transport, a setting that it does not take, or addresses or a dtype that are none.
    """
    from torchrl_ext.collectors.updater import TransportWeightUpdater  # its base class warns of its deprecation
    from torchrl_ext.rpc.http import normalise_url

    given = {name: value for name, value in settings.items() if value is not None}
    check_settings(transport, given)
    addresses = [engine] if isinstance(engine, str) else engine
    if isinstance(addresses, Sequence):
        if not addresses:
            raise ConfigError("the list of engines is empty", hint="give host:port of each, or no engine at all")
        engine = [normalise_url(address) for address in addresses]
    try:
        cast = None if dtype is None else dtype_from_name(dtype)
    except ManifestError as error:
        raise ConfigError(f"dtype: {error}", expected="a name such as bfloat16") from None
    proof: dict[str, Any] = {"verify": verify, "rehearse": rehearse, "max_gap": max_gap}
    return TransportWeightUpdater(transport, engine, mapper=mapper, dtype=cast, finite=finite, **proof, **given)


register()
