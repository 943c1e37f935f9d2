"""Find what an engine reads under the roots of trainers: versions that a call names, and adapters.

A trainer may hand a path to an engine's ``/update_weights_from_disk`` with ``load_format="delta"``: a version directory
``weight_v000007``, or the root that holds it; then the newest version is meant.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator
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
from torchrl_ext.versions.foreign import ForeignVersions

__all__ = ["check_adapter", "invited", "locate", "parameters"]


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


def parameters(root: str, version: int, base: str, files: Collection[str] | None = None) -> list[Any]:
    """Return the parameters of a version, as JSON; ``files``, where given, has to name all of its files.

    Raises:
        StoreError: there is no such version.
        ConfigError: ``files`` names only a part of them.
    """
    store = open_store(root)
    chain = Chain(store, foreign=ForeignVersions(store, base if os.path.isdir(base) else None))
    try:
        params = chain.version(version).params
        names = set(store.list(version_name(version)))
    except FileNotFoundError as error:
        raise StoreError(
            f"{root} holds no version {version}",
            state="the engine serves what it served",
            hint="publish every file of a version before the engine is told of it",
        ) from error
    lost = sorted(name for name in names - set(files or names) if name.endswith((".safetensors", ".bin")))
    if lost and MANIFEST not in names:
        raise ConfigError(
            f"the call names only a part of version {version}: not {lost[0]}",
            expected="one call per version, when all of its files are there",
            state="the engine serves what it served",
        )
    return [meta.to_json() for meta in params]


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
