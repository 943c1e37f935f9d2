"""The layouts of deltas by name, and which one an encoding takes."""

from __future__ import annotations

from torchrl_ext.codecs.base import Codec
from torchrl_ext.errors import ManifestError
from torchrl_ext.versions.delta_files import Container, Packed
from torchrl_ext.versions.slime.current import ForeignWhole, Whole
from torchrl_ext.versions.slime.first import Flushes, ForeignFlushes

__all__ = ["CONTAINERS", "container_for", "container_of"]

CONTAINERS: dict[str, Container] = {
    container.name: container for container in (Packed(), Flushes(), Whole(), ForeignFlushes(), ForeignWhole())
}
_OF_ENCODING = {**dict.fromkeys(("indices", "deltas", "deltas_zstd"), "flushes"), "xor": "whole", "overwrite": "whole"}


def container_for(codec: Codec) -> Container:
    """Return the layout in which deltas of an encoding are written."""
    return CONTAINERS[_OF_ENCODING.get(codec.name, "packed")]


def container_of(name: str, where: str) -> Container:
    """Return the layout in which a delta was written.

    Args:
        name: as its manifest says.
        where: its folder, for messages.

    Raises:
        ManifestError: no such layout here.
    """
    if name not in CONTAINERS:
        raise ManifestError(
            f"{where} is laid out in a form unknown here: there is no container called {name!r}",
            expected=f"one of {', '.join(CONTAINERS)}",
        )
    return CONTAINERS[name]
