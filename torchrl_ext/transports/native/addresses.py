"""Where the ranks of a group listen, read from what gloo leaves for them in the group's store.

It is read with care, since nobody promised the format: the address of this process is known, so it is looked up in what
this process left, and those of others are taken from the same place. Each rank leaves the name of its host (a length of
eight bytes, and the name), and then its address as the system writes it; older releases of torch leave no name. What is
not understood only makes an abort slower.
"""

from __future__ import annotations

import ipaddress
import struct
from typing import Any

__all__ = ["listening_at"]

_INET, _INET6, _ADDRESS_BYTES = 2, 10, 28


def listening_at(keys: Any, rank: int, size: int, own: set[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    """Return the addresses, ``(host, port)``, at which ranks of a gloo group listen, as far as they are understood.

    Args:
        keys: the group's store.
        rank: of this process.
        size: number of ranks.
        own: at which this process listens.
    """
    try:
        blobs = [bytes(keys.get(f"0/{one}")) for one in range(size)]
    except RuntimeError:
        return set()
    found, mine = set(), blobs[rank]
    for endpoint in own:
        at = mine.find(_written(*endpoint))
        if at >= 0:
            found |= {_read(blob, at - _name_bytes(mine) + _name_bytes(blob)) for blob in blobs}
    return {endpoint for endpoint in found if endpoint is not None}


def _name_bytes(blob: bytes) -> int:
    """Return the length of the host's name with which ``blob`` begins; 0 where it begins otherwise."""
    (length,) = struct.unpack_from("=Q", blob) if len(blob) >= 8 else (0,)
    return length if length < len(blob) - 8 and blob[8 : 8 + length].isascii() else 0


def _written(host: str, port: int) -> bytes:
    """Return the beginning of struct sockaddr_in, or of sockaddr_in6, as the system writes it."""
    address = ipaddress.ip_address(host)
    if address.version == 4:
        return struct.pack("=H", _INET) + struct.pack(">H", port) + address.packed
    return struct.pack("=H", _INET6) + struct.pack(">HI", port, 0) + address.packed


def _read(blob: bytes, at: int) -> tuple[Any, ...] | None:
    """Return the address that begins ``at`` this place, IPv4 in its own form; None where there is none."""
    if not 0 <= at <= len(blob) - _ADDRESS_BYTES:
        return None
    (family,), (port,) = struct.unpack_from("=H", blob, at), struct.unpack_from(">H", blob, at + 2)
    if family == _INET:
        return str(ipaddress.IPv4Address(blob[at + 4 : at + 8])), port
    if family == _INET6:
        return str(ipaddress.IPv6Address(blob[at + 8 : at + 24])).removeprefix("::ffff:"), port
    return None
