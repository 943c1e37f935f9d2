"""Unpacking of zstd frames from elsewhere, whose claims are not trusted."""

from __future__ import annotations

import zstandard

from torchrl_ext.errors import IntegrityError

__all__ = ["decompress"]

Buffer = bytes | bytearray | memoryview
_FED_BYTES = 1024  # at a time, of a frame that does not say how much it holds


def decompress(data: Buffer, most: int, what: str) -> bytes:
    """Return the content of one zstd frame, and never more than ``most`` bytes, whatever the frame claims.

    Args:
        data: untrusted bytes.
        most: bound on the content, in bytes.
        what: names the frame, for messages.

    Raises:
        IntegrityError: ``data`` is no frame, or a damaged one; or its content is longer than ``most`` bytes.
    """
    try:
        size = zstandard.frame_content_size(data)
        if size > most:
            raise _bad(what, f"its zstd frame declares {size} bytes", f"at most {most}")
        if size >= 0:
            return zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
        # a streamed frame: fed piecemeal, so that a bomb is caught after its first excess
        reader, view = zstandard.ZstdDecompressor().decompressobj(read_across_frames=False), memoryview(data)
        pieces, total = [], 0
        for at in range(0, len(view), _FED_BYTES):
            pieces.append(reader.decompress(view[at : at + _FED_BYTES]))
            total += len(pieces[-1])
            if total > most:
                raise _bad(what, f"its zstd frame gives more than {most} bytes")
        if not reader.eof or reader.unused_data:
            raise _bad(what, "its zstd frame has no end, or more after it")
        return b"".join(pieces)
    except zstandard.ZstdError as error:
        raise _bad(what, f"its zstd frame cannot be read: {error}") from None


def _bad(what: str, why: str, expected: str | None = None) -> IntegrityError:
    return IntegrityError(
        f"{what} is damaged: {why}",
        expected=expected,
        state="nothing of it was used",
        hint="fetch the file again, or catch up from a keyframe",
    )
