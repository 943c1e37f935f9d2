"""Find what an engine reads under the roots of trainers: versions that a call names, and adapters.

A trainer may hand a path to an engine's ``/update_weights_from_disk`` with ``load_format="delta"``: a version directory
``weight_v000007``, or the root that holds it; then the newest version is meant.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchrl_ext.errors import ConfigError, StoreError
from torchrl_ext.messages import CheckAdapter, Join
from torchrl_ext.stores import open_store
from torchrl_ext.stores.chain import Chain
from torchrl_ext.stores.manifest import MANIFEST
from torchrl_ext.stores.opening import admit
from torchrl_ext.stores.versions import version_name, version_number
from torchrl_ext.transports.shared_root import VISIBLE_S, SharedRoot
from torchrl_ext.types import adapter_rank
from torchrl_ext.versions.foreign import ForeignVersions, is_flush
from torchrl_ext.weights.checkpoint import CheckpointSource

__all__ = ["check_adapter", "invited", "locate", "parameters", "part"]


def locate(path: str) -> tuple[str, int]:
    """Return the root and the version that a path names.

    Raises:
        ConfigError: the engine may not open it.
        StoreError: there is no version there.
    """
    admit(path)
    given = Path(path).absolute()
    version = version_number(given.name)
    if version is not None:
        return str(given.parent), version
    if not given.is_dir():
        raise StoreError(f"{path} is no directory", state="the engine serves what it served")
    store = open_store(given)
    version = Chain(store, foreign=ForeignVersions(store, None)).latest()
    if not version:
        raise StoreError(f"{path} holds no version", state="the engine serves what it served")
    return str(given), version


def part(root: str, version: int, files: Any) -> list[str] | None:
    """Return the files that a call names, where they are of slime's first format and so may be a part of the version.

    Raises:
        ConfigError: ``files`` is no list of names.
        StoreError: one of them is not there.
    """
    if files is None:
        return None
    if not isinstance(files, list) or not files or not all(isinstance(name, str) for name in files):
        raise ConfigError(
            f"files is {files!r:.80}", expected="a list of names", state="the engine serves what it served"
        )
    names = set(open_store(root).list(version_name(version)))
    if not all(map(is_flush, files)) or MANIFEST in names:
        return None
    lost = min(set(files) - names, default=None)
    if lost is not None:
        raise _absent(root, version, f", or not {lost} of it")
    return sorted(files)


def parameters(root: str, version: int, base: str, files: Any = None, *, parts: bool = False) -> list[Any]:
    """Return the parameters of a version, as JSON; ``files``, where given, has to name all of its files.

    Args:
        root: where the versions lie.
        version: the number.
        base: the checkpoint that the engine was started with.
        files: names of its files, or None.
        parts: a version of slime's first format may come in parts: whoever calls has paused the engine, and lets it
            serve when the last one came.

    Raises:
        StoreError: there is no such version.
        ConfigError: ``files`` names only a part of them.
    """
    store, own = open_store(root), part(root, version, files)
    if (
        parts and own is not None and os.path.isdir(base)
    ):  # the versions before may be gone, and change no name or shape
        return [meta.to_json() for meta in CheckpointSource(base).params()]
    chain = Chain(store, foreign=ForeignVersions(store, base if os.path.isdir(base) else None))
    try:
        params = chain.version(version).params
        names = set(store.list(version_name(version)))
    except FileNotFoundError as error:
        raise _absent(root, version) from error
    lost = sorted(name for name in names - {*(files or names)} if name.endswith((".safetensors", ".bin")))
    if lost and MANIFEST not in names and not (parts and own is not None):
        raise ConfigError(
            f"the call names only a part of version {version}: not {lost[0]}",
            expected="one call per version, when all of its files are there; or a pause before the first call",
            state="the engine serves what it served",
        )
    return [meta.to_json() for meta in params]


def _absent(root: str, version: int, more: str = "") -> StoreError:
    return StoreError(
        f"{root} holds no version {version}{more}",
        state="the engine serves what it served",
        hint="publish every file of a version before the engine is told of it",
    )


@contextmanager
def invited(root: str, reader: str, base: str | None, params: list[Any]) -> Iterator[Join]:
    """Yield the message by which workers join the chain under ``root`` where no trainer invites them.

    Args:
        root: where the versions lie.
        reader: a name for these workers.
        base: the checkpoint that the engine was started with, where it is a local one.
        params: what a version holds, as `parameters` gives it.
    """
    probe = SharedRoot(open_store(root), reader)
    try:
        yield Join.of({"transport": "delta", "base": base, "needs_base": False, "params": params, **probe.invite()})
    finally:
        probe.clear()


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
        admit(message.root.get("root"))
        SharedRoot(open_store(message.root["root"]), "").find(message.root, VISIBLE_S, threading.Event())
