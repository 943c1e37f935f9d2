"""LoRA adapters by name and version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchrl_ext.messages.base import Message
from torchrl_ext.messages.fields import Count, ObjectOrNone, Params, Text
from torchrl_ext.types import Info

__all__ = ["CheckAdapter", "CheckLoaded", "ListAdapters", "ServeAdapter", "StageAdapter", "UnloadAdapter"]


@dataclass(frozen=True, kw_only=True)
class CheckAdapter(Message):
    """Could such a LoRA adapter be loaded?

    Attributes:
        params: its tensors.
        root: where its versions will lie, as `SharedRoot.invite` gives it; None where that was looked at already.
    """

    kind: ClassVar[str] = "check_adapter"
    params: Params
    root: ObjectOrNone = None

    @classmethod
    def of(cls, info: Info) -> CheckAdapter:
        """The message around what `Transport.open` gives, once ``params`` were added to it.

        Raises:
            ConfigError: the parameters are none.
        """
        return cls.from_json({"params": info.get("params"), "root": {k: v for k, v in info.items() if k != "params"}})


@dataclass(frozen=True, kw_only=True)
class ListAdapters(Message):
    """What does each name stand for? The answer has ``adapters``: ``{name: {"version"}}``."""

    kind: ClassVar[str] = "list_adapters"


@dataclass(frozen=True, kw_only=True)
class StageAdapter(Message):
    """Load a version; nobody is served with it yet.

    Attributes:
        name: what requests call the adapter.
        version: of the adapter.
        path: the directory of its files.
    """

    kind: ClassVar[str] = "stage_adapter"
    name: Text
    version: Count
    path: Text


@dataclass(frozen=True, kw_only=True)
class ServeAdapter(Message):
    """From now on the name stands for a version that was staged.

    The answer may have ``in_use``: the versions that requests are still at work with.
    """

    kind: ClassVar[str] = "serve_adapter"
    name: Text
    version: Count


@dataclass(frozen=True, kw_only=True)
class UnloadAdapter(Message):
    """From now on requests by the name are refused."""

    kind: ClassVar[str] = "unload_adapter"
    name: Text


@dataclass(frozen=True, kw_only=True)
class CheckLoaded(Message):
    """To workers: has every tensor of the adapter that was loaded under ``label`` a layer that it is applied in?"""

    kind: ClassVar[str] = "check_loaded"
    label: Text
