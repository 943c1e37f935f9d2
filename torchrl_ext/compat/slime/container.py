"""Safetensors files as bytes; nothing is trusted in one from elsewhere."""

from __future__ import annotations

from torchrl_ext.errors import IntegrityError
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.tensorfile import HEADER_DAMAGE, parse_header

__all__ = ["Buffer", "parse_safetensors"]

Buffer = bytes | bytearray | memoryview

_LARGEST_HEADER = 100_000_000  # the reference reader's limit


def parse_safetensors(
    data: Buffer, where: str, header_bytes: int = _LARGEST_HEADER
) -> tuple[dict[str, str], dict[str, tuple[ParamMeta, memoryview]]]:
    """Return the metadata of a safetensors file, and what each tensor is with its bytes, which share the file's memory.

    Args:
        data: untrusted bytes.
        where: name of the file, for messages.
        header_bytes: bound on the header, which takes some twenty times its size while it is parsed.

    Raises:
        IntegrityError: the bytes are not a file that every reader would understand alike; names file and tensor.
    """
    view = memoryview(data).cast("B")
    length = int.from_bytes(view[:8], "little") if len(view) >= 8 else -1
    try:
        if not 2 <= length <= min(len(view) - 8, header_bytes):
            raise ValueError(f"its header would take {length} bytes of {len(view)}")
        body = view[8 + length :]
        found, metadata = parse_header(bytes(view[8 : 8 + length]), len(body))
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata is not a mapping of strings")
    except HEADER_DAMAGE as error:
        raise IntegrityError(
            f"{where} is damaged: {error}",
            state="nothing of it was used",
            hint="fetch the file again, or catch up from a keyframe",
        ) from None
    return metadata, {name: (meta, body[begin : begin + meta.nbytes]) for name, (meta, begin) in found.items()}
