"""Encodings of deltas by name: those of blocks (`torchrl_ext.data.deltas.blocks.BlockEncoding`), and those of whole
parameters in files of another layout (`torchrl_ext.data.versions.containers.FileEncoding`)."""

from __future__ import annotations

from typing import Any

from torchrl_ext.base.errors import ConfigError, ManifestError
from torchrl_ext.base.registry import encodings
from torchrl_ext.base.types import Info

__all__ = ["codec_from_json", "encodings", "make_codec"]


def make_codec(name: str) -> Any:
    """Return the encoding called ``name``.

    Raises:
        ConfigError: the name is unknown.
    """
    return encodings.make(name)


def codec_from_json(info: Info) -> Any:
    """Return the encoding that its `to_json` described.

    Args:
        info: ``{"name": ..., settings}``.

    Raises:
        ManifestError: this process does not know the encoding, or it does not take these settings.
    """
    if not isinstance(info, dict) or not isinstance(info.get("name"), str):
        raise ManifestError(f"{info!r} does not describe a codec", expected='{"name": ..., settings}')
    try:
        return encodings.make(**info)
    except ConfigError as error:
        raise ManifestError(f"a delta has an unknown encoding: {error.what}", hint=error.hint) from error
