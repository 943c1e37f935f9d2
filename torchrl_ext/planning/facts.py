"""The facts about a deployment from which the planner predicts costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from torchrl_ext.errors import ConfigError

__all__ = ["Facts"]

_PER_TENSOR = 25_000_000  # large decoders have about one tensor per this many parameters


def _fact(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What weight updates depend on in a deployment; each field's ``metadata["help"]`` explains it.

    Fields that end in ``_bytes_s`` are speeds in bytes per second. ``device_bytes_s`` and ``host_link_bytes_s`` are
    used only with device ``"cuda"``.

    Raises:
        ConfigError: a value or a combination of values is impossible.
    """

    parameters: int = _fact(8_000_000_000, "elements of the model")
    bytes_per_parameter: float = _fact(2.0, "2 for bfloat16")
    tensors: int | None = _fact(None, "number of tensors; by default estimated from the parameters")
    density: float = _fact(0.01, "share of elements that change between two updates")
    engines: int = _fact(1, "how many engines follow")
    workers_per_engine: int = _fact(1, "workers that share the model in one engine, tp * pp * dp")
    trainer_ranks: int = _fact(1, "trainer ranks among which the weights are sharded; 1 if one rank holds them all")
    regions: int = _fact(1, "regions with engines, the trainer's included")
    owned: bool | None = _fact(None, "the training job starts the engines; by default only if topology is set")
    topology: bool = _fact(False, "prefill/decode pools, several models, different groups or overrides are needed")
    frozen_models: bool = _fact(False, "reference, reward or tool models are served beside the policy")
    colocated: bool = _fact(False, "trainer and engines share their devices")
    same_stack: bool = _fact(True, "engines run in a compatible environment on compatible devices")
    group: bool = _fact(True, "a process group between trainer and engines can be formed")
    shared_path: str | None = _fact(None, "directory or bucket that both sides see")
    validate_delta: bool = _fact(False, "you want to test the delta's coding and loading within one datacenter")
    network_bytes_s: float = _fact(12.5e9, "bytes a second of one host's network")
    disk_bytes_s: float = _fact(2e9, "bytes a second of the shared path, all readers of a region together")
    wan_bytes_s: float = _fact(125e6, "bytes a second between the trainer and another region")
    device_bytes_s: float = _fact(2e12, "bytes a second of an accelerator's own memory")
    host_link_bytes_s: float = _fact(25e9, "bytes a second between an accelerator and its host")
    code_bytes_s: float = _fact(
        1.4e9, "bytes a second of the model that one core compares and codes (torchrl-ext bench delta)"
    )
    cores: int = _fact(16, "cores of the host that finds and codes changes")
    interval_s: float = _fact(60.0, "seconds from one update to the next")
    device: str = _fact("cuda", "cuda (NCCL) or cpu (gloo)")

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.type == "int" and (type(value) is not int or value < 1):
                raise ConfigError(f"{one.name} is {value!r}", expected="a whole number of at least 1")
            if one.type == "float" and not 0 < value < math.inf:
                raise ConfigError(f"{one.name} is {value!r}", expected="a positive number")
        tensors = 1 if self.tensors is None else self.tensors
        not_owned = self.owned is False and self.topology
        for wrong, what, expected in (
            (not 1 <= tensors <= self.parameters, f"tensors is {tensors!r}", "from 1 to the number of parameters"),
            (self.density > 1, f"density is {self.density!r}", "a share above 0 and up to 1, such as 0.01"),
            (self.device not in ("cuda", "cpu"), f"device is {self.device!r}", "'cuda' or 'cpu'"),
            (self.regions > self.engines, f"{self.engines} engines are in {self.regions} regions", "an engine in each"),
            (not_owned, "a topology needs engines that the job starts", "owned=True, or no topology"),
            (self.colocated and self.regions > 1, "colocated engines are where the trainer is", "regions=1"),
            (self.validate_delta and self.colocated, "a delta does not go with colocated engines", "colocated=False"),
        ):
            if wrong:
                raise ConfigError(what, expected=expected)

    @property
    def job_owns(self) -> bool:
        """Whether the job starts the engines: `owned`, or by default `topology`."""
        return self.topology if self.owned is None else self.owned

    @property
    def tensor_count(self) -> int:
        """The number of tensors: `tensors`, or an estimate from `parameters`."""
        return self.tensors or max(1, min(self.parameters, max(100, self.parameters // _PER_TENSOR)))

    @property
    def model_bytes(self) -> float:
        """Bytes of one full version of the weights."""
        return self.parameters * self.bytes_per_parameter

    @property
    def on_host(self) -> bool:
        """Whether weights live in host memory."""
        return self.device == "cpu"
