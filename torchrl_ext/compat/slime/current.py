"""slime's current delta files, as bytes: one safetensors entry (U8) of payload per changed tensor, and an index.

Source: THUDM/slime at 474861aaf. ``weight_v{N:06d}/model-{i:05d}-of-{total:05d}.safetensors`` with i from 0; a file's
metadata maps each tensor to the checksum of its *new full* bytes. ``model.safetensors.index.json`` is written last and
names version, base version, encoding, compression and checksum format; without changes it is the only file.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
import xxhash

from torchrl_ext.compat.slime.container import Buffer, parse_safetensors
from torchrl_ext.errors import ConfigError, IntegrityError

__all__ = [
    "CHECKSUMS",
    "INDEX_NAME",
    "DeltaIndex",
    "Shard",
    "checksum",
    "parse_index",
    "parse_shard",
    "shard_name",
    "split_shards",
]

INDEX_NAME: Final = "model.safetensors.index.json"
CHECKSUMS: Final = ("xxh3-128", "blake3", "adler32", "sha256")  # slime has the first three, SkyRL the first and last
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.safetensors")
_VERSION = re.compile(r"[0-9]{1,18}")


def shard_name(index: int, total: int) -> str:
    """Return the name of a file, as ``model-00000-of-00002.safetensors``; ``index`` counts from 0."""
    return f"model-{index:05d}-of-{total:05d}.safetensors"


def checksum(algorithm: str, data: Buffer | np.ndarray) -> str:
    """Return the hex digest of the bytes of a tensor.

    Raises:
        ConfigError: unknown algorithm, or its package is not installed.
    """
    algorithms: dict[str, Callable[[Any], str]] = {
        "xxh3-128": xxhash.xxh3_128_hexdigest,
        "adler32": lambda raw: f"{zlib.adler32(raw):08x}",
        "blake3": _blake3,
        "sha256": lambda raw: hashlib.sha256(raw).hexdigest(),
    }
    if algorithm not in algorithms:
        raise ConfigError(f"there is no checksum called {algorithm!r}", expected=f"one of {', '.join(CHECKSUMS)}")
    buffer = cast(Buffer, data)  # which an array is, though its stub says so from Python 3.12 on only
    return algorithms[algorithm](memoryview(buffer).cast("B") if len(buffer) else b"")


def _blake3(raw: Any) -> str:
    try:
        import blake3
    except ImportError:
        raise ConfigError("checksum 'blake3' needs a package of that name", hint="pip install blake3") from None
    return blake3.blake3(raw).hexdigest()


class Shard(NamedTuple):
    """One file, read back: payloads, which share its memory, and checksums of the new full tensors; both by name."""

    payloads: Mapping[str, memoryview]
    checksums: Mapping[str, str]


def parse_shard(data: Buffer, where: str) -> Shard:
    """Return what one file holds.

    Raises:
        IntegrityError: it is damaged; names file and tensor.
    """
    metadata, entries = parse_safetensors(data, where)
    for name, (meta, _) in entries.items():
        if meta.dtype != torch.uint8 or len(meta.shape) != 1:
            raise IntegrityError(f"{where}: payload of {name!r} is {meta}", expected="U8[n]")
        if name not in metadata:
            raise IntegrityError(f"{where}: tensor {name!r} has no checksum")
    return Shard({name: payload for name, (_, payload) in entries.items()}, {name: metadata[name] for name in entries})


@dataclass(frozen=True, kw_only=True)
class DeltaIndex:
    """The content of ``model.safetensors.index.json`` of a delta version.

    Attributes:
        version, base_version: as integers; written with six digits.
        delta_encoding: ``"xor"`` or ``"overwrite"``.
        compression_format: of payloads.
        checksum_format: one of `CHECKSUMS`.
        weight_map: tensor name -> file name.
    """

    version: int
    base_version: int
    delta_encoding: str
    compression_format: str = "zstd"
    checksum_format: str = "xxh3-128"
    weight_map: Mapping[str, str]

    def to_bytes(self) -> bytes:
        """Return the bytes of the file."""
        metadata = {
            "version": f"{self.version:06d}",
            "base_version": f"{self.base_version:06d}",
            "delta_encoding": self.delta_encoding,
            "compression_format": self.compression_format,
            "checksum_format": self.checksum_format,
        }
        return json.dumps({"metadata": metadata, "weight_map": dict(self.weight_map)}).encode()


_KEYS: Final = ("version", "base_version", "delta_encoding", "compression_format", "checksum_format")


def parse_index(data: Buffer, where: str) -> tuple[DeltaIndex | None, Mapping[str, str]]:
    """Return what an index says, of a delta or of a full checkpoint, trusting nothing in it.

    Returns:
        The index of a delta, None where it is one of a full checkpoint; and tensor name -> file name.

    Raises:
        IntegrityError: it is no index, or file names lead elsewhere; names the file.
    """
    try:
        document = json.loads(bytes(data))
        metadata, weight_map = document.get("metadata", {}), document["weight_map"]
        if not isinstance(metadata, dict) or not isinstance(weight_map, dict):
            raise TypeError("metadata or weight_map is not an object")
        for name, file in weight_map.items():
            if not isinstance(file, str) or not _FILE.fullmatch(file):
                raise ValueError(f"tensor {name!r} is kept in {file!r}, which is not a plain file name")
        if not any(key in metadata for key in _KEYS[1:]):  # a full one may well say its version
            return None, weight_map
        words = [str(word) if type(word) is int else word for word in (metadata[key] for key in _KEYS)]
        if not all(isinstance(word, str) for word in words) or not all(map(_VERSION.fullmatch, words[:2])):
            raise ValueError(f"a delta is described by {words}")
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise IntegrityError(f"{where} is damaged: {error!r}", state="nothing was read") from None
    version, base_version, encoding, compression, algorithm = words
    index = DeltaIndex(
        version=int(version),
        base_version=int(base_version),
        delta_encoding=encoding,
        compression_format=compression,
        checksum_format=algorithm,
        weight_map=weight_map,
    )
    return index, weight_map


def split_shards(sizes: Iterable[tuple[str, int]], shard_bytes: int) -> list[list[str]]:
    """Group names in order into files of at most ``shard_bytes`` each; a larger tensor gets one of its own."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes:
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    return shards
