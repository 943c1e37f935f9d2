"""Tables of classes by name, imported on first use: choosing `disk` never imports what `collective` needs.

Other packages add transports through the entry-point group ``torchrl_ext.transports``. Every process whose environment
has the package, trainer or engine, then knows the transport::

    [project.entry-points."torchrl_ext.transports"]
    pigeon = "my_package.pigeon:PigeonTransport"
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from torchrl_ext.base.errors import ConfigError

log = logging.getLogger("torchrl_ext")

__all__ = ["Make", "Makes", "Registry", "encodings", "engines", "transports"]


class Registry:
    """A table of named implementations of one contract.

    Args:
        kind: the noun in messages, for example ``"transport"``.
        entries: our own classes: name -> (path below this package as ``"module:Class"``, one-line summary).
        group: entry-point group through which other packages add names; None for a closed table.
    """

    def __init__(self, kind: str, entries: Mapping[str, tuple[str, str]], *, group: str | None = None) -> None:
        self._kind, self._own, self._group = kind, entries, group

    @cached_property
    def _entries(self) -> dict[str, tuple[str, str]]:
        """The path and the summary of each name; one that is taken keeps its class."""
        found = {name: (f"torchrl_ext.{path}", summary) for name, (path, summary) in self._own.items()}
        for point in () if self._group is None else entry_points(group=self._group):
            package = point.dist.name if point.dist else "an unknown one"
            path, _ = found.setdefault(point.name, (point.value, f"of package {package}"))
            if path != point.value:
                words = "%s %r of package %s is left out: the name is taken by %s"
                log.warning(words, self._kind, point.name, package, path)
        return found

    def names(self) -> MappingProxyType[str, str]:
        """Return a read-only mapping of each name to its one-line summary."""
        return MappingProxyType({name: summary for name, (_, summary) in self._entries.items()})

    def load(self, name: str) -> type[Any]:
        """Import and return the class behind ``name``.

        Raises:
            ConfigError: the name is not registered, its import fails, or its module lacks the class.
        """
        if name not in self._entries:
            raise self._unknown(name, self._entries)
        return self._imported(name, self._entries[name][0])

    def _unknown(self, name: str, known: Iterable[str]) -> ConfigError:
        names = sorted(known)
        close = difflib.get_close_matches(str(name), names, n=1)
        others = self._group and f"install its package, which names it in {self._group!r}"
        return ConfigError(
            f"there is no {self._kind} called {name!r}",
            expected=f"one of {', '.join(names)}",
            hint=f"did you mean {close[0]!r}?" if close else others,
        )

    def make(self, name: str, **settings: Any) -> Any:
        """Build the class behind ``name`` with ``settings``.

        Raises:
            ConfigError: the name is unknown, its import fails, or the class does not take these settings. The
                constructor's own errors pass through.
        """
        return self._built(name, self.load(name), settings)

    def _built(self, name: str, cls: Any, settings: Mapping[str, Any]) -> Any:
        signature = inspect.signature(cls)
        try:
            signature.bind(**settings)
        except TypeError as error:
            raise ConfigError(
                f"{self._kind} {name!r} does not take these settings: {error}",
                expected=f"some of {', '.join(signature.parameters)}" if signature.parameters else "none",
            ) from error
        return cls(**settings)

    def _imported(self, name: str, path: str) -> Any:
        module, _, attribute = path.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except Exception as error:  # another package's module may raise anything
            hint = f"install a release of the package that has {path}"
            if isinstance(error, ImportError):
                hint = "install the package that the message names"
            raise ConfigError(f"{self._kind} {name!r} cannot be imported: {error}", hint=hint) from error


transports = Registry(
    "transport",
    {
        "collective": (
            "data.transports.collective:VLLMCollectiveTransport",
            "broadcast over NCCL (CUDA) or gloo (CPU)",
        ),
        "disk": ("data.transports.disk:DiskTransport", "complete Hugging Face checkpoints in a shared directory"),
        "delta": ("data.transports.delta:DeltaTransport", "only what changed, as a chain of versions"),
        "ipc": ("data.transports.ipc:IPCTransport", "shared memory (CPU) or CUDA IPC (GPU) on one machine"),
        "sharded": (
            "data.sharded.transport:ShardedTransport",
            "slices from the trainer ranks that hold them to the workers that need them",
        ),
        "native": (
            "data.transports.native:NativeTransport",
            "broadcasts to stock engines: SGLang's distributed updates, vLLM's nccl backend",
        ),
        "memory": ("data.transports.memory:MemoryTransport", "within one process"),
    },
    group="torchrl_ext.transports",
)


@dataclass(frozen=True, kw_only=True)
class Make:
    """The parts of one kind of engine: objects, or import paths (``"package.module:name"``) that are resolved on use.

    A package adds its `Make` through the entry-point group ``torchrl_ext.engines``::

        [project.entry-points."torchrl_ext.engines"]
        dove = "my_package.dove:MAKE"

    Attributes:
        client: callable that makes an engine's `torchrl_ext.EngineClient` from ``url=`` and further settings.
        describe: callable that takes the `torchrl_ext.control.http.HTTPSession` of an address and returns the engine's
            `EngineInfo`, or None if no engine of this kind answers there. None for engines without an address.
        dialect: the `torchrl_ext.control.requests.dialects.Dialect` of its token requests, a value.
        server: the `torchrl_ext.control.serving.server.EngineSpec` of servers that this library starts.
        router: the `torchrl_ext.control.serving.server.RouterSpec` of the vendor's router.
        routes: HTTP routes of an update: by transport (``"disk"``, ``"native"``) of a server without our plugin, and
            under ``""`` with it.
    """

    client: Any
    describe: Any = None
    dialect: Any = None
    server: Any = None
    router: Any = None
    routes: Any = None


class Makes(Registry):
    """The table of the kinds of engines."""

    def make(self, name: str, **settings: Any) -> Any:
        """Build the client of an engine of kind ``name``; see `Registry.make`."""
        return self._built(name, self.part(name, "client"), settings)

    def part(self, name: str, role: str) -> Any:
        """Return the part of kind ``name`` in the field ``role`` of its `Make`.

        Raises:
            ConfigError: there is no such kind, its import fails, or it has no such part.
        """
        if name not in self.names():
            raise self._unknown(name, self.having(role))
        found = getattr(self.load(name), role)
        if found is None:
            raise ConfigError(f"{name!r} engines have no {role}", expected=f"one of {', '.join(self.having(role))}")
        return self._imported(name, found) if isinstance(found, str) else found

    def having(self, role: str) -> Iterator[str]:
        """Yield the kinds whose `Make` has the field ``role``; log and skip those that cannot be imported."""
        for name in self.names():
            try:
                found = getattr(self.load(name), role)
            except ConfigError as error:
                log.warning("%s", error)
            else:
                if found is not None:
                    yield name


engines = Makes(
    "engine",
    {
        "vllm": ("control.makes.vllm:VLLM", "a vLLM server over HTTP"),
        "sglang": ("control.makes.sglang:SGLANG", "an SGLang server over HTTP"),
        "embedded": ("control.makes.vllm:EMBEDDED", "the embedded transformers engine over HTTP"),
        "inprocess": (
            "sync.local.inprocess:INPROCESS",
            "a module, a receiver or a vLLM object in this process",
        ),
        "ray": ("sync.local.ray:RAY", "engines in Ray actors, and TorchRL's vLLM engines"),
    },
    group="torchrl_ext.engines",
)

encodings = Registry(
    "encoding",
    {
        "ulp": ("data.deltas.blocks:ulp", "gaps and steps in units in the last place; the fast one"),
        "context": ("data.deltas.blocks:context", "the same, sorted by the exponent of the base; the tight one"),
        "bitmap": (
            "data.deltas.blocks:bitmap",
            "a bit for each unit, and the new ones; the one at the speed of memory",
        ),
        "auto": ("data.deltas.blocks:auto", "ulp, or bitmap where that block is shorter"),
        "indices": ("data.deltas.blocks:indices", "positions of 32 bits, and the new ones"),
        "deltas": ("data.deltas.blocks:deltas", "gaps between positions of 16 or 32 bits, and the new ones"),
        "deltas_zstd": ("data.deltas.blocks:deltas_zstd", "deltas, packed by zstd"),
    },
)
