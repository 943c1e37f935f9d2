"""`WeightUpdateConfig`: the weight-update options of slime and vime, under their names there.

Source of names and defaults: the external-engine guides of slime and vime (`--update-weight-mode full|delta`,
`--update-weight-transport nccl|disk`, `--rollout-external-engine-addrs`, ...); transport ``sharded`` is ours.
Invalid combinations raise an error before anything is opened.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.base.registry import transports

if TYPE_CHECKING:
    from torchrl_ext.base.types import EngineInfo

log = logging.getLogger("torchrl_ext")

__all__ = ["TransportConfig", "WeightUpdateConfig"]

_FLAGS: Mapping[str, dict[str, Any]] = {
    "int": {"type": int}, "float": {"type": float}, "bool": {"action": "store_true"}, "tuple[str, ...]": {"nargs": "+"},
}  # fmt: skip


class TransportConfig(NamedTuple):
    """The name of a transport, and the settings that options give; the transport has defaults for the rest."""

    name: str
    settings: Mapping[str, Any]


def _option(default: Any, text: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": text, **more})


def _also(name: str, text: str = "") -> Any:
    return _option(None, f"another name of {name}{text}", also=name)


def _kind(option: dataclasses.Field[Any]) -> str:
    return str(option.type).removesuffix(" | None")


@dataclass(frozen=True, kw_only=True)
class WeightUpdateConfig:
    """How weights reach the rollout engines; ``metadata["help"]`` of each option explains it.

    Raises:
        ConfigError: an invalid value or combination; has the reason and the remedy.

    Example:
        >>> options = tx.WeightUpdateConfig(update_weight_transport="disk", update_weight_disk_dir=root)
        >>> options.make_transport().name
        'disk'
    """

    update_weight_mode: str = _option("full", "full (all tensors) or delta (what changed)", choices=("full", "delta"))
    update_weight_transport: str = _option(
        "nccl",
        "nccl (a process group; gloo without a GPU), disk, or sharded (a process group in which each trainer rank "
        "sends what it holds)",
        choices=("nccl", "disk", "sharded"),
    )
    update_weight_encoding: str = _option(
        "auto", "encoding of deltas: auto, ulp, context, bitmap, or slime's indices, deltas, deltas_zstd"
    )
    update_weight_disk_dir: str | None = _option(
        None, "directory that trainer and engines see under the same path; for deltas also the URL of a bucket"
    )
    update_weight_disk_keep_files: bool = _option(False, "keep versions that every engine has loaded")
    rollout_external_engine_addrs: tuple[str, ...] = _option(
        (), "host:port of engines that run already; vLLM and SGLang may be mixed"
    )
    vllm_config: str | None = _option(None, "YAML of vLLM engines that the job owns")
    sglang_config: str | None = _option(None, "YAML of SGLang engines that the job owns")
    vllm_router_ip: str | None = _option(None, "address of a running router")
    vllm_router_port: int | None = _option(None, "port of that router")
    sglang_router_ip: str | None = _also("vllm_router_ip", ", for a pool of SGLang engines")
    sglang_router_port: int | None = _also("vllm_router_port")
    colocate: bool = _option(
        False, "trainer and engines share their devices: full updates go by memory handles; refused with delta"
    )

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            name, value = option.name, getattr(self, option.name)
            choices, other = option.metadata.get("choices"), option.metadata.get("also")
            if choices is not None and value not in choices:
                raise ConfigError(f"{name} is {value!r}", expected=" or ".join(map(repr, choices)))
            if _kind(option) == "int" and value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} is {value!r}", expected="a whole number of at least 1, or none")
            if other is not None and value is not None:
                first = getattr(self, other)
                if first not in (None, value):
                    raise ConfigError(f"{other} is {first!r}, and {name} is {value!r}", hint="give one of the two")
                object.__setattr__(self, other, value)
        for refused, why, hint in self._refusals():
            if refused:
                raise ConfigError(why, hint=hint)

    def _refusals(self) -> Iterator[tuple[bool, str, str]]:
        """Yield each rule on combinations: whether the options break it, the reason and the remedy."""
        from torchrl_ext.base.registry import encodings
        from torchrl_ext.control.http import normalise_urls

        delta, disk = self.update_weight_mode == "delta", self.update_weight_transport == "disk"
        route, place, encoding = self.update_weight_transport, self.update_weight_disk_dir, self.update_weight_encoding
        yield (
            encoding not in encodings.names(),
            f"there is no encoding {encoding!r}",
            f"use one of {', '.join(sorted(encodings.names()))}",
        )
        yield (
            delta and self.colocate,
            "delta mode does not go with colocated engines: they receive weights by memory handles, which a delta "
            "would not make smaller",
            "use update_weight_mode='full' with colocate",
        )
        yield (
            route == "sharded" and (delta or self.colocate),
            "transport 'sharded' carries full updates to engines on other devices",
            "use update_weight_transport='nccl' or 'disk' for deltas, and 'nccl' with colocate",
        )
        yield (
            disk and place is None,
            "transport 'disk' has no directory",
            "set update_weight_disk_dir to one that both sides see",
        )
        for name in ("update_weight_disk_dir", "update_weight_disk_keep_files"):
            yield (
                not disk and bool(getattr(self, name)),
                f"{name} is set, and transport {route!r} writes no files",
                f"set update_weight_transport='disk' and update_weight_disk_dir, or leave {name} out",
            )
        yield (
            disk and not delta and "://" in str(place).removeprefix("file://"),
            f"full versions are checkpoint directories, and {place!r} is an object store",
            "use update_weight_mode='delta' (its first version is a full one), or a directory",
        )
        owned, addresses = bool(self.vllm_config or self.sglang_config), self.rollout_external_engine_addrs
        yield (
            isinstance(addresses, str),
            f"rollout_external_engine_addrs is the string {addresses!r}",
            "give a sequence of host:port",
        )
        if addresses:
            normalise_urls(addresses)  # raises if one is invalid or repeated
        yield (
            owned and bool(addresses),
            "rollout_external_engine_addrs and vllm_config or sglang_config exclude each other: engines are "
            "external, or belong to this job",
            "keep one of the two",
        )
        server = "vllm" if self.sglang_router_ip is None and self.sglang_router_port is None else "sglang"
        yield (
            (self.vllm_router_ip is None) != (self.vllm_router_port is None),
            f"a router needs {server}_router_ip and {server}_router_port",
            "set both or none",
        )

    def transport_config(self, engines: Sequence[EngineInfo] = ()) -> TransportConfig:
        """Return the name and the settings of the transport that these options describe.

        Full updates of colocated engines over ``nccl`` use memory handles (``ipc``), because two processes on one
        device cannot form a process group.

        Args:
            engines: the engines that will follow, as for `make_transport`.

        Raises:
            ConfigError: the engines have no broadcast in common.
        """
        name, delta = self.update_weight_transport, self.update_weight_mode == "delta"
        settings: dict[str, Any] = {}
        if name == "disk":
            settings |= {"root": self.update_weight_disk_dir, "keep_files": self.update_weight_disk_keep_files}
        elif delta:
            settings["carrier"] = "collective"
        elif name == "nccl":
            name = "ipc" if self.colocate else "collective"
        if delta:
            name = "delta"
            settings["encoding"] = self.update_weight_encoding
        chosen = TransportConfig(name, settings)
        return _broadcast_to(engines, chosen) if name == "collective" else chosen

    def make_transport(self, engines: Sequence[EngineInfo] = (), **settings: Any) -> Any:
        """Make the transport that these options describe.

        Args:
            engines: the engines that will follow, if known (`torchrl_ext.discover`): if some run without our plugin
                and all support the same native wire, full broadcasts use that (transport ``native``).
            settings: arguments of the transport that add to the options or override them.

        Raises:
            ConfigError: invalid settings, or the engines have no broadcast in common.
        """
        chosen = self.transport_config(engines)
        return transports.make(chosen.name, **{**chosen.settings, **settings})

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add a flag per option: ``--update-weight-mode`` and so on."""
        group = parser.add_argument_group("weight updates")
        for option in dataclasses.fields(cls):
            more = {name: value for name, value in option.metadata.items() if name != "also"}
            more |= _FLAGS.get(_kind(option), {})
            group.add_argument(f"--{option.name.replace('_', '-')}", dest=option.name, default=None, **more)

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> WeightUpdateConfig:
        """Make a config from parsed command-line options."""
        given: dict[str, Any] = {option.name: getattr(args, option.name) for option in dataclasses.fields(cls)}
        given = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if v is not None}
        return cls(**given)


def _broadcast_to(engines: Sequence[EngineInfo], ours: TransportConfig) -> TransportConfig:
    """Return the transport for full broadcasts: ``ours``, or ``native`` if some engines lack our plugin."""
    without = ", ".join(info.url for info in engines if "collective" not in info.transports)
    if not without:
        return ours
    kinds = sorted({info.kind for info in engines})
    silent = ", ".join(info.url for info in engines if "native" not in info.transports)
    if silent or len(kinds) > 1:
        why = f"{silent} has no broadcast of its own" if silent else f"engines of {' and '.join(kinds)} share none"
        raise ConfigError(
            f"{without} cannot follow by broadcasts of ours, and {why}",
            expected="our plugin in every engine, or engines of one make that can follow by 'native'",
            hint="install the plugin there, or set update_weight_transport='disk'; `torchrl-ext doctor` says more",
        )
    log.info("%s run without our plugin: full updates go by transport 'native'", without)
    return TransportConfig(name="native", settings={**ours.settings, "make": kinds[0]})
