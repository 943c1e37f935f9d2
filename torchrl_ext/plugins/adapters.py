"""What adapter names stand for in a server of either engine: each version is loaded under a label of its own.

A name is pointed at a label (``policy-lora@7``) in one step, so a request keeps the version that it began with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError
from torchrl_ext.messages import CheckAdapter, Message, ServeAdapter, StageAdapter, UnloadAdapter
from torchrl_ext.routes import ListAdapters
from torchrl_ext.stores import open_store
from torchrl_ext.stores.opening import admit
from torchrl_ext.transports.shared_root import VISIBLE_S, Invitation
from torchrl_ext.types import Info
from torchrl_ext.weights.peft import adapter_label, adapter_rank, adapter_version

__all__ = ["AdapterTable", "NoAdapterError", "check_adapter", "refuse_layers"]


class NoAdapterError(ConfigError):
    """Raised where no adapter of a name is loaded."""


class AdapterTable(ABC):
    """The adapters of one server, and the messages about them."""

    async def handle(self, message: Message) -> Info:
        """Do what a message says, and return ``{"adapters": {name: {"version", ...}}}``.

        Raises:
            ConfigError, EngineError, NotConnectedError: it cannot be done; the names stand for what they stood for.
        """
        more: Info = {}
        match message:
            case CheckAdapter():
                await self.check(message)
            case StageAdapter():
                path = admit(message.path)
                await self.stage(message.name, adapter_label(message.name, message.version), path)
            case ServeAdapter():
                more = self.serve(message.name, adapter_label(message.name, message.version))
            case UnloadAdapter():
                if message.name not in self.served:
                    there = ", ".join(self.served) or "none"
                    raise NoAdapterError(f"no adapter {message.name!r} is loaded; there are: {there}")
                await self.unload(message.name)
            case ListAdapters():
                pass
            case _:
                raise ConfigError(f"a message of kind {message.kind!r} is not one that adapters handle")
        return {"adapters": {name: self.row(name, label) for name, label in self.served.items()}, **more}

    def row(self, name: str, label: str) -> Info:
        """Describe what a name stands for."""
        return {"version": adapter_version(label)}

    @property
    @abstractmethod
    def served(self) -> Mapping[str, str]:
        """The label that each name stands for."""

    @abstractmethod
    async def check(self, message: CheckAdapter) -> None:
        """Refuse an adapter that the engine cannot take."""

    @abstractmethod
    async def stage(self, name: str, label: str, path: str) -> None:
        """Load the files at ``path`` under a label."""

    @abstractmethod
    def serve(self, name: str, label: str) -> Info:
        """Point a name at a label that was staged; return what else to answer."""

    @abstractmethod
    async def unload(self, name: str) -> None:
        """Forget a name, whose running requests end with the version that they began with."""


def check_adapter(message: CheckAdapter, *, enabled: bool, max_rank: int | None) -> None:
    """Refuse a LoRA adapter that an engine of these settings cannot take.

    Raises:
        ConfigError: the server was started without LoRA, or for smaller ranks, or may not open the adapters' root.
        StoreError: the root cannot be seen from here.
    """
    if not enabled:
        raise ConfigError("LoRA is not enabled", hint="start the server with --enable-lora")
    rank = adapter_rank(message.params)
    if max_rank is not None and rank > max_rank:
        raise ConfigError(
            f"LoRA rank {rank} is greater than max_lora_rank {max_rank}",
            hint=f"start the server with --max-lora-rank {rank} or more",
        )
    if message.root is not None:
        store = open_store(admit(message.root.get("root")))
        Invitation.from_json(message.root, "the root of an adapter").find(store, Deadline(VISIBLE_S))


def refuse_layers(
    layers: Iterable[str], applies: Callable[[str], bool], known: Iterable[str], hint: str | None = None
) -> None:
    """Refuse an adapter with a layer that no LoRA here applies, other than those of experts, which engines pack.

    Raises:
        ConfigError: names the first such layer.
    """
    for layer in layers:
        if ".experts" not in layer and not applies(layer):
            raise ConfigError(
                f"the engine has no LoRA for layer {layer!r}",
                expected=f"some of {', '.join(sorted(set(known)))}",
                hint=hint
                or "leave it out of target_modules, or name it in --lora-target-modules when you start the server",
            )
