"""`WeightUpdateConfig`: the options of the frameworks that this library learnt from, under the names they have there.

Source of names and defaults: the external-engine guides of slime and vime (`--update-weight-mode full|delta`,
`--update-weight-transport nccl|disk`, `--rollout-external-engine-addrs`, ...). Combinations that cannot work are
refused before anything is opened.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass, field
from typing import Any

from torchrl_ext.errors import ConfigError
from torchrl_ext.registry import transports

__all__ = ["WeightUpdateConfig"]


def _option(default: Any, text: str, **more: Any) -> Any:
    metadata = {"help": text, **more}
    if default is list:
        return field(default=(), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class WeightUpdateConfig:
    """How weights get to the rollout engines.

    Attributes:
        update_weight_mode: ``"full"`` or ``"delta"``.
        update_weight_transport: ``"nccl"`` (a process group; gloo where there is no GPU) or ``"disk"``.
        update_weight_encoding: encoding of deltas, one of `DeltaTransport.encodings`.
        update_weight_disk_dir: directory that trainer and engines see under the same path.
        update_weight_disk_keep_files: keep versions that every engine has loaded.
        update_weight_local_checkpoint_dir: accepted for its name only: engines keep what they need in memory.
        rollout_external_engine_addrs: ``host:port`` of engines that somebody else started.
        vllm_config, sglang_config: YAML of engines that the training job owns.
        vllm_router_ip, vllm_router_port: a router that runs already.
        colocate: trainer and engines share their devices.

    Raises:
        ConfigError: a value or a combination that cannot work, with the reason and the remedy.
    """

    update_weight_mode: str = _option("full", "full or delta", choices=("full", "delta"))
    update_weight_transport: str = _option("nccl", "nccl (gloo without a GPU) or disk", choices=("nccl", "disk"))
    update_weight_encoding: str = _option("auto", "encoding of deltas")
    update_weight_disk_dir: str | None = _option(None, "directory that trainer and engines see under the same path")
    update_weight_disk_keep_files: bool = _option(False, "keep versions that every engine has loaded")
    update_weight_local_checkpoint_dir: str | None = _option(None, "refused: engines keep what they need in memory")
    rollout_external_engine_addrs: tuple[str, ...] = _option(list, "host:port of engines that run already", nargs="+")
    vllm_config: str | None = _option(None, "YAML of vLLM engines that the job owns")
    sglang_config: str | None = _option(None, "YAML of SGLang engines that the job owns")
    vllm_router_ip: str | None = _option(None, "address of a router that runs already")
    vllm_router_port: int | None = _option(None, "its port", type=int)
    colocate: bool = _option(False, "trainer and engines share their devices")

    def __post_init__(self) -> None:
        for name in ("update_weight_mode", "update_weight_transport"):
            choices = self.__dataclass_fields__[name].metadata["choices"]
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} is {getattr(self, name)!r}", expected=" or ".join(map(repr, choices)))
        delta, disk = self.update_weight_mode == "delta", self.update_weight_transport == "disk"
        if delta and self.colocate:
            raise ConfigError(
                "delta mode does not go with colocated engines: they take weights by memory handles, and a delta would "
                "not make those smaller",
                hint="use update_weight_mode='full' with colocate",
            )
        if disk and self.update_weight_disk_dir is None:
            raise ConfigError(
                "transport 'disk' has no directory", hint="set update_weight_disk_dir to one that both sides see"
            )
        if not disk and self.update_weight_disk_dir is not None:
            raise ConfigError(
                "update_weight_disk_dir is set, and transport 'nccl' writes no files",
                hint="set update_weight_transport='disk', or leave the directory out",
            )
        if self.update_weight_local_checkpoint_dir is not None:
            raise ConfigError(
                "update_weight_local_checkpoint_dir has no use here: an engine patches its parameters in place, and "
                "keeps copies of those that it cannot patch in memory",
                hint="leave it out",
            )
        owned = [name for name in ("vllm_config", "sglang_config") if getattr(self, name) is not None]
        if self.rollout_external_engine_addrs and owned:
            raise ConfigError(
                f"rollout_external_engine_addrs and {owned[0]} exclude each other: engines belong to somebody else, or "
                "to this job",
                hint="keep one of the two",
            )
        if (self.vllm_router_ip is None) != (self.vllm_router_port is None):
            raise ConfigError("a router needs vllm_router_ip and vllm_router_port", hint="set both or none")
        if delta:
            self._check_encoding()

    def _check_encoding(self) -> None:
        from torchrl_ext.codecs.base import encodings

        if self.update_weight_encoding not in encodings.names():
            raise ConfigError(
                f"there is no encoding {self.update_weight_encoding!r}",
                expected=f"one of {', '.join(sorted(encodings.names()))}",
            )

    def make_transport(self, **settings: Any) -> Any:
        """The transport that these options name.

        Args:
            settings: further settings of the transport, under its own names.
        """
        disk = self.update_weight_transport == "disk"
        files = {"root": self.update_weight_disk_dir, "keep_files": self.update_weight_disk_keep_files} if disk else {}
        if self.update_weight_mode == "full":
            return transports.make("disk" if disk else "collective", **{**files, **settings})
        road = files if disk else {"carrier": "collective"}
        return transports.make("delta", **{"encoding": self.update_weight_encoding, **road, **settings})

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add a flag per option: ``--update-weight-mode`` and so on."""
        group = parser.add_argument_group("weight updates")
        for option in dataclasses.fields(cls):
            more = dict(option.metadata)
            if isinstance(option.default, bool):
                more["action"] = "store_true"
            group.add_argument(f"--{option.name.replace('_', '-')}", dest=option.name, default=None, **more)

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> WeightUpdateConfig:
        """The options that were given on the command line."""
        given = {option.name: getattr(args, option.name) for option in dataclasses.fields(cls)}
        given = {name: value for name, value in given.items() if value is not None}
        if "rollout_external_engine_addrs" in given:
            given["rollout_external_engine_addrs"] = tuple(given["rollout_external_engine_addrs"])
        return cls(**given)
