"""Tables of classes by name, imported on first use, so that picking `disk` never imports what `collective` needs.

Transports of other packages come by the entry-point group ``torchrl_ext.transports``: a package names its class there,
and every process in whose environment it is installed knows it, a trainer as well as an engine::

    [project.entry-points."torchrl_ext.transports"]
    pigeon = "my_package.pigeon:PigeonTransport"
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
import threading
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torchrl_ext.errors import ConfigError

log = logging.getLogger("torchrl_ext")

__all__ = ["Entry", "Registry", "engines", "launchers", "scorers", "transports"]


@dataclass(frozen=True)
class Entry:
    """One row of a registry: where a class lives, and what it is for."""

    path: str
    summary: str


class Registry:
    """A growing table of named implementations of one contract.

    Args:
        kind: the word used in messages, for example ``"transport"``.
        group: entry-point group by which other packages add names; None for a table that they cannot add to.
    """

    def __init__(self, kind: str, group: str | None = None) -> None:
        self._kind, self._group, self._looking = kind, group, threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._aliases: dict[str, str] = {}

    def register(self, name: str, path: str, summary: str) -> None:
        """Add ``name`` for the class at ``path`` (``"package.module:Class"``).

        Raises:
            ConfigError: the name stands for another class already.
        """
        entry = Entry(path, summary)
        known = self._entries.get(name)
        if known is not None and known.path != path:
            raise ConfigError(f"{self._kind} name {name!r} is taken by {known.path}", hint="pick another name")
        self._entries[name] = entry

    def alias(self, name: str, of: str) -> None:
        """Let ``name``, a word of other projects, stand for the registered name ``of``; `names` has only the latter."""
        self._aliases[name] = of

    def names(self) -> MappingProxyType[str, str]:
        """Return a read-only mapping of the names to one line each."""
        if self._group is not None:
            self._look_around(self._group)
        return MappingProxyType({name: entry.summary for name, entry in self._entries.items()})

    def load(self, name: str) -> type[Any]:
        """Import and return the class behind ``name``.

        Raises:
            ConfigError: nobody registered the name, its imports fail, or its module has no such class.
        """
        if self._group is not None:
            self._look_around(self._group)
        if name not in self._entries:  # a package may have brought a class by the name of an alias
            name = self._aliases.get(name, name)
        if name not in self._entries:
            close = difflib.get_close_matches(str(name), self._entries, n=1)
            raise ConfigError(
                f"there is no {self._kind} called {name!r}",
                expected=f"one of {', '.join(sorted(self._entries))}",
                hint=f"did you mean {close[0]!r}?" if close else None,
            )
        entry = self._entries[name]
        module, _, attribute = entry.path.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ImportError as error:
            raise ConfigError(
                f"{self._kind} {name!r} cannot be imported: {error}",
                hint="install the package that the message names",
            ) from error
        except Exception as error:  # whatever another package's module raises while it is imported
            raise ConfigError(
                f"{self._kind} {name!r} cannot be imported: {error}",
                hint=f"{entry.path} is what its package names: install a release of it that has this class",
            ) from error

    def make(self, name: str, **settings: Any) -> Any:
        """Build the class behind ``name`` with ``settings``.

        Raises:
            ConfigError: unknown name, failing import, or settings that the class does not take. What a constructor
                raises by itself is raised as it is.
        """
        cls = self.load(name)
        signature = inspect.signature(cls)
        try:
            signature.bind(**settings)
        except TypeError as error:
            raise ConfigError(
                f"{self._kind} {name!r} does not take these settings: {error}",
                expected=f"some of {', '.join(signature.parameters)}" if signature.parameters else "none",
            ) from error
        return cls(**settings)

    def _look_around(self, group: str) -> None:
        """Add what installed packages have in the entry-point group, once; a name that is taken keeps its class."""
        from importlib.metadata import entry_points  # imported late: its call scans all installed packages

        with self._looking:
            if self._group is None:  # another thread was first
                return
            for point in entry_points(group=group):
                package = "another package" if point.dist is None else f"package {point.dist.name}"
                known = self._entries.setdefault(point.name, Entry(point.value, f"of {package}"))
                if known.path != point.value:
                    log.warning(
                        "%s %r of %s is left out: the name is taken by %s", self._kind, point.name, package, known.path
                    )
            self._group = None


transports = Registry("transport", group="torchrl_ext.transports")
transports.register(
    "collective",
    "torchrl_ext.transports.collective.transport:VLLMCollectiveTransport",
    "broadcast over NCCL (CUDA) or gloo (CPU)",
)
transports.register(
    "disk", "torchrl_ext.transports.disk:DiskTransport", "complete Hugging Face checkpoints in a shared directory"
)
transports.register(
    "delta", "torchrl_ext.transports.delta.transport:DeltaTransport", "only what changed, as a chain of versions"
)
transports.register(
    "ipc", "torchrl_ext.transports.ipc.transport:IPCTransport", "shared memory (CPU) or CUDA IPC (GPU) on one machine"
)
transports.register(
    "sharded",
    "torchrl_ext.transports.sharded.transport:ShardedTransport",
    "slices from the trainer ranks that hold them to the workers that need them",
)
transports.register(
    "native",
    "torchrl_ext.transports.native.transport:NativeTransport",
    "broadcasts to stock engines: SGLang's distributed updates, vLLM's nccl backend",
)
transports.alias("nccl", "collective")  # SkyRL's words
transports.alias("broadcast", "collective")
transports.alias("cuda_ipc", "ipc")
transports.register("memory", "torchrl_ext.transports.memory:MemoryTransport", "within one process")

engines = Registry("engine")
engines.register("vllm", "torchrl_ext.rpc.engines.vllm:VLLMEngine", "a vLLM server over HTTP")
engines.register("sglang", "torchrl_ext.rpc.engines.sglang:SGLangEngine", "an SGLang server over HTTP")
engines.register(
    "embedded", "torchrl_ext.rpc.engines.vllm:EmbeddedEngine", "the embedded transformers engine over HTTP"
)
engines.register(
    "inprocess",
    "torchrl_ext.sync.engines.inprocess:InProcessEngine",
    "a module, a receiver or a vLLM object in this process",
)

engines.register(
    "ray", "torchrl_ext.sync.engines.ray:connect_actors", "engines in Ray actors, and TorchRL's vLLM engines"
)

scorers = Registry("scorer")
scorers.register("vllm", "torchrl_ext.plugins.vllm.scorer:VLLMScorer", "log-probabilities of tokens by a vLLM object")

launchers = Registry("engine to start")
launchers.register("embedded", "torchrl_ext.launch.engines.embedded:EmbeddedServer", "the embedded transformers engine")
launchers.register("vllm", "torchrl_ext.launch.engines.vllm:VLLMServer", "a stock vLLM server")
launchers.register("sglang", "torchrl_ext.launch.engines.sglang:SGLangServer", "a stock SGLang server")
