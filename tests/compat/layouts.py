"""Roots as other programs write them, made here of their published facts with the reference libraries alone."""

from __future__ import annotations

import hashlib
import json

import torch
import xxhash
import zstandard
from safetensors.torch import save

from tests.compat.test_slime_chains import raw


def write_skyrl(root, version, old, new, algorithm="xxh3-128", **more):
    """One delta of SkyRL, in one payload file."""
    folder, file, rows, payloads = root / f"delta-{version:08d}", "delta-rank00000-file000000.safetensors", [], {}
    folder.mkdir(parents=True)
    for name, tensor in new.items():
        before, after = raw(old[name]), raw(tensor)
        if (before == after).all():
            continue
        packed = zstandard.ZstdCompressor(level=1).compress((before ^ after).tobytes())
        payloads[name] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        digest = xxhash.xxh3_128_hexdigest(after) if algorithm == "xxh3-128" else hashlib.sha256(after).hexdigest()
        rows.append(
            {
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "uncompressed_num_bytes": after.nbytes,
                "compressed_num_bytes": len(packed),
                "payload_file": file,
                "payload_key": name,
                "checksum": digest,
                "checksum_algorithm": algorithm,
            }
        )
    if payloads:
        (folder / file).write_bytes(save(payloads))
    manifest = {
        "version": version,
        "base_version": version - 1,
        "tensors": rows,
        "total_uncompressed_num_bytes": sum(row["uncompressed_num_bytes"] for row in rows),
        "total_compressed_num_bytes": sum(row["compressed_num_bytes"] for row in rows),
        "payload_files": [file] if payloads else [],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest | more))
    return folder


def edit_manifest(folder, change):
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
