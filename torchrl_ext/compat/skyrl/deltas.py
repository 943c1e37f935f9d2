"""The files in which SkyRL publishes deltas, read and written for ``torchrl-ext chain convert``.

    delta-00000007/delta-rank00000-file000000.safetensors    one `xor` payload (U8) per changed tensor, under its name
    delta-00000007/manifest.json                             the last file; a row per changed tensor

Version 0 is a base checkpoint, and each version is a delta on the one before. Source: NovaSky-AI/SkyRL at a9564572e,
`weight_sync/delta_checkpoint.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain as joined
from typing import Any, Final

from torch import Tensor

from torchrl_ext.codecs.base import Encoded, make_codec
from torchrl_ext.codecs.patch import apply_patch
from torchrl_ext.compat.slime.container import build_payloads, parse_safetensors
from torchrl_ext.compat.slime.current import checksum
from torchrl_ext.errors import ConfigError, IntegrityError
from torchrl_ext.stores import Store
from torchrl_ext.stores.manifest import LARGEST, MANIFEST
from torchrl_ext.types import Info, ParamMeta, dtype_name
from torchrl_ext.versions.containers import OtherDelta
from torchrl_ext.weights.checkpoint import CheckpointSource
from torchrl_ext.weights.digests import byte_view

__all__ = ["delta_files", "delta_name", "holds_deltas", "read_versions"]

PAYLOAD_BYTES: Final = 1 << 30  # of one file, SkyRL's default
_CHECKSUM: Final = "xxh3-128"
_FOLDER: Final = re.compile(r"delta-(\d{8,18})", re.ASCII)


def delta_name(version: int) -> str:
    """Return the folder of a version: 7 -> ``"delta-00000007"``."""
    return f"delta-{version:08d}"


def holds_deltas(store: Store) -> bool:
    """Return whether SkyRL publishes into ``store``."""
    return any(map(_FOLDER.fullmatch, store.list()))


def read_versions(store: Store, base: str | None) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
    """Yield the number and the tensors of each complete version, in order; every changed tensor is verified first.

    The tensors are those of the base checkpoint, changed in place from version to version.

    Args:
        store: the folder of all versions; its files are untrusted.
        base: the checkpoint directory that is version 0.

    Raises:
        ConfigError: no ``base``.
        IntegrityError: a version is missing or damaged; names the file, and the tensor where one is concerned.
    """
    if base is None:
        raise ConfigError(
            f"the versions in {store.url} build on a checkpoint that is not among them",
            expected="the checkpoint that SkyRL's trainer started from",
            hint="name its directory with --base",
        )
    numbers = sorted(int(match[1]) for match in map(_FOLDER.fullmatch, store.list()) if match)
    tensors = {name: tensor.clone() for name, tensor in CheckpointSource(base)}
    for number in numbers:
        if MANIFEST not in store.list(delta_name(number)) and number == numbers[-1]:
            return  # it is being written
        _apply(store, number, tensors)
        yield number, tensors


def _apply(store: Store, number: int, tensors: Mapping[str, Tensor]) -> None:
    """Bring tensors from the version before to ``number``, in place."""
    where, xor = f"{store.url}/{delta_name(number)}", make_codec("xor")
    try:
        document = json.loads(store.get(f"{delta_name(number)}/{MANIFEST}", at_most=LARGEST))
        if (document["version"], document["base_version"]) != (number, number - 1):
            raise ValueError(f"it is version {document['version']!r} on {document['base_version']!r}")
        rows, seen = dict[str, dict[str, tuple[str, str]]](), set[str]()
        for row in document["tensors"]:
            name, file = row["name"], row["payload_file"]
            if name not in tensors or name in seen or row.get("payload_key", name) != name:
                raise ValueError(f"tensor {name!r} is unknown, twice there, or under another name")
            if not re.fullmatch(r"[\w.\-]+\.safetensors", file, re.ASCII):
                raise ValueError(f"{file!r} is not a plain file name")
            seen.add(name)
            kind = row.get("checksum_algorithm", _CHECKSUM) if "checksum" in row else "sha256"
            rows.setdefault(file, {})[name] = kind, row["checksum"] if "checksum" in row else row["sha256"]
        if {*document.get("payload_files", rows)} != rows.keys():
            raise ValueError("its rows and its payload_files name other files")
        payloads = {file: store.get(f"{delta_name(number)}/{file}") for file in rows}
    except FileNotFoundError as error:
        raise _damaged(where, f"{error} is missing") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(f"{where}/{MANIFEST}", repr(error)) from None
    for file, sums in rows.items():
        _, entries = parse_safetensors(payloads[file], f"{where}/{file}")
        if entries.keys() != sums.keys():
            raise _damaged(f"{where}/{file}", f"it and the manifest differ in {sorted(entries.keys() ^ sums.keys())}")
        for name, (kind, stated) in sums.items():
            tensor = tensors[name]
            apply_patch(xor.decode(entries[name][1], ParamMeta.of(name, tensor), tensor), tensor)
            if (found := checksum(kind, byte_view(tensor).numpy())) != stated:
                raise _damaged(f"{where}/{file}", f"tensor {name!r} becomes {found}, not {kind} {stated}")


def _damaged(where: str, why: str) -> IntegrityError:
    return IntegrityError(
        f"{where} is damaged: {why}",
        expected="a delta on the version before it, as SkyRL publishes",
        state="no part of this version was loaded",
        hint="let the trainer publish again, or check --base",
    )


def delta_files(delta: OtherDelta, changes: Iterable[Encoded]) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each file of a delta, the manifest last.

    Args:
        delta: its new tensors and its numbers.
        changes: `xor` payloads.
    """
    rows, names, waiting, size = list[Info](), list[str](), dict[str, bytes](), 0
    for change in joined(changes, [None]):
        payload = b"" if change is None else change.payload
        if waiting and (change is None or size + len(payload) > PAYLOAD_BYTES):
            names.append(f"delta-rank00000-file{len(names):06d}.safetensors")
            yield names[-1], build_payloads(waiting)
            waiting, size = {}, 0
        if change is None or not change.changed:
            continue
        meta = change.meta
        waiting[meta.name], size = payload, size + len(payload)
        rows.append(
            {
                "name": meta.name,
                "dtype": dtype_name(meta.dtype),
                "shape": list(meta.shape),
                "uncompressed_num_bytes": meta.nbytes,
                "compressed_num_bytes": len(payload),
                "payload_file": f"delta-rank00000-file{len(names):06d}.safetensors",
                "payload_key": meta.name,
                "checksum": checksum(_CHECKSUM, byte_view(delta.tensors[meta.name]).numpy()),
                "checksum_algorithm": _CHECKSUM,
            }
        )
    manifest: dict[str, Any] = {
        "version": delta.version,
        "base_version": delta.base_version,
        "tensors": rows,
        "total_uncompressed_num_bytes": sum(row["uncompressed_num_bytes"] for row in rows),
        "total_compressed_num_bytes": sum(row["compressed_num_bytes"] for row in rows),
        "payload_files": names,
    }
    yield MANIFEST, json.dumps(manifest).encode()
