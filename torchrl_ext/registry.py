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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torchrl_ext.errors import ConfigError

log = logging.getLogger("torchrl_ext")

__all__ = ["Make", "Makes", "Registry", "engines", "transports"]


class Registry:
    """A growing table of named implementations of one contract.

    Args:
        kind: the word used in messages, for example ``"transport"``.
        entries: our own classes: name -> path below this package (``"module:Class"``), and one line on its use.
        group: entry-point group by which other packages add names; None for a table that they cannot add to.
        aliases: words of other projects -> the registered names that they stand for; `names` does not list them.
    """

    def __init__(
        self,
        kind: str,
        entries: Mapping[str, tuple[str, str]] = MappingProxyType({}),
        *,
        group: str | None = None,
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._kind, self._group, self._aliases = kind, group, aliases
        self._loading = threading.Lock()
        self._entries = {name: (f"torchrl_ext.{path}", summary) for name, (path, summary) in entries.items()}

    def register(self, name: str, path: str, summary: str) -> None:
        """Add ``name`` for the class at ``path`` (``"package.module:Class"``).

        Raises:
            ConfigError: the name stands for another class already.
        """
        taken, _ = self._entries.setdefault(name, (path, summary))
        if taken != path:
            raise ConfigError(f"{self._kind} name {name!r} is taken by {taken}", hint="pick another name")

    def names(self) -> MappingProxyType[str, str]:
        """Return a read-only mapping of the names to one line each."""
        self._load_entry_points()
        return MappingProxyType({name: summary for name, (_, summary) in self._entries.items()})

    def load(self, name: str) -> type[Any]:
        """Import and return the class behind ``name``.

        Raises:
            ConfigError: nobody registered the name, its imports fail, or its module has no such class.
        """
        self._load_entry_points()
        if name not in self._entries:  # a package may have brought a class by the name of an alias
            name = self._aliases.get(name, name)
        if name not in self._entries:
            raise self._unknown(name, self._entries)
        return self._imported(name, self._entries[name][0])

    def _unknown(self, name: str, known: Iterable[str]) -> ConfigError:
        """Return the error for a name that nobody registered, with those that could be meant."""
        names = sorted(known)
        close = difflib.get_close_matches(str(name), names, n=1)
        return ConfigError(
            f"there is no {self._kind} called {name!r}",
            expected=f"one of {', '.join(names)}",
            hint=f"did you mean {close[0]!r}?" if close else None,
        )

    def make(self, name: str, **settings: Any) -> Any:
        """Build the class behind ``name`` with ``settings``.

        Raises:
            ConfigError: unknown name, failing import, or settings that the class does not take. What a constructor
                raises by itself is raised as it is.
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
        except Exception as error:  # whatever another package's module raises while it is imported
            hint = f"{path} is what its package names: install a release of it that has this class"
            if isinstance(error, ImportError):
                hint = "install the package that the message names"
            raise ConfigError(f"{self._kind} {name!r} cannot be imported: {error}", hint=hint) from error

    def _load_entry_points(self) -> None:
        """Add what installed packages have in the entry-point group, once; a name that is taken keeps its class.

        A package with damaged files is left out. Where the system refuses a file, the next call looks again.
        """
        if self._group is None:
            return
        from importlib.metadata import distributions  # imported late: its call scans all installed packages

        with self._loading:
            group, refused = self._group, False
            for package in distributions() if group is not None else ():
                try:
                    for point in package.entry_points.select(group=group):
                        path, _ = self._entries.setdefault(point.name, (point.value, f"of package {package.name}"))
                        if path != point.value:
                            words = "%s %r of package %s is left out: the name is taken by %s"
                            log.warning(words, self._kind, point.name, package.name, path)
                except Exception as error:  # noqa: BLE001 - whatever damaged files raise
                    refused |= isinstance(error, OSError)
                    log.warning("%ss of one package are left out: %s", self._kind, error)
            self._group = group if refused else None


transports = Registry(
    "transport",
    {
        "collective": (
            "transports.collective.transport:VLLMCollectiveTransport",
            "broadcast over NCCL (CUDA) or gloo (CPU)",
        ),
        "disk": ("transports.disk:DiskTransport", "complete Hugging Face checkpoints in a shared directory"),
        "delta": ("transports.delta.transport:DeltaTransport", "only what changed, as a chain of versions"),
        "ipc": ("transports.ipc.transport:IPCTransport", "shared memory (CPU) or CUDA IPC (GPU) on one machine"),
        "sharded": (
            "transports.sharded.transport:ShardedTransport",
            "slices from the trainer ranks that hold them to the workers that need them",
        ),
        "native": (
            "transports.native.transport:NativeTransport",
            "broadcasts to stock engines: SGLang's distributed updates, vLLM's nccl backend",
        ),
        "memory": ("transports.memory:MemoryTransport", "within one process"),
    },
    group="torchrl_ext.transports",
    aliases={"nccl": "collective", "broadcast": "collective", "cuda_ipc": "ipc"},  # SkyRL's words
)


@dataclass(frozen=True, kw_only=True)
class Make:
    """A make of engine, by its parts: objects, or import paths (``"package.module:name"``) that are followed on use.

    A package names its record in the entry-point group ``torchrl_ext.engines``::

        [project.entry-points."torchrl_ext.engines"]
        dove = "my_package.dove:MAKE"

    Attributes:
        client: makes the `torchrl_ext.EngineClient` of an engine, from ``url=`` and further settings.
        describe: takes the `torchrl_ext.rpc.http.HTTPSession` of an address, and returns its `EngineInfo`; None where
            an engine of another make, or none, answers there. None for a make that no address leads to.
        dialect: the `torchrl_ext.rollout.dialects.Dialect` of its requests for tokens.
        server: the `torchrl_ext.serving.server.EngineSpec` of a server that this library starts.
        router: the `torchrl_ext.serving.router.RouterSpec` of the router that goes with it.
    """

    client: Any
    describe: Any = None
    dialect: Any = None
    server: Any = None
    router: Any = None


class Makes(Registry):
    """The table of makes of engines."""

    def make(self, name: str, **settings: Any) -> Any:
        """Build the client of an engine of the make called ``name``; see `Registry.make`."""
        return self._built(name, self.part(name, "client"), settings)

    def part(self, name: str, role: str) -> Any:
        """Return a part of the make called ``name``, a field of `Make`.

        Raises:
            ConfigError: there is no such make, its imports fail, or it has no such part.
        """
        if name not in self.names():
            raise self._unknown(name, self.having(role))
        found = getattr(self.load(name), role)
        if found is None:
            raise ConfigError(f"{name!r} engines have no {role}", expected=f"one of {', '.join(self.having(role))}")
        return self._imported(name, found) if isinstance(found, str) else found

    def having(self, role: str) -> Iterator[str]:
        """Yield the names of the makes that have a part, a field of `Make`; one that cannot be imported is left out."""
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
        "vllm": ("rpc.makes.vllm:VLLM", "a vLLM server over HTTP"),
        "sglang": ("rpc.makes.sglang:SGLANG", "an SGLang server over HTTP"),
        "embedded": ("rpc.makes.vllm:EMBEDDED", "the embedded transformers engine over HTTP"),
        "inprocess": (
            "sync.engines.inprocess:INPROCESS",
            "a module, a receiver or a vLLM object in this process",
        ),
        "ray": ("sync.engines.ray:RAY", "engines in Ray actors, and TorchRL's vLLM engines"),
    },
    group="torchrl_ext.engines",
)
