"""A name's addresses, within a deadline: neither the look-up nor a list of dead addresses may take longer."""

from __future__ import annotations

import ipaddress
import socket
from concurrent.futures import Future, wait
from threading import Thread

__all__ = ["addresses_of"]


def addresses_of(host: str, port: int, timeout_s: float) -> list[str]:
    """What ``host`` stands for, in the system's order of preference; itself where it is an address already.

    Raises:
        TimeoutError: the look-up takes longer than ``timeout_s`` seconds. It may go on in a thread of its own.
        OSError: nobody knows the name.
    """
    if _is_address(host):
        return [host]
    found: Future[list[str]] = Future()

    def look() -> None:
        try:
            rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found.set_result(list(dict.fromkeys(str(row[4][0]) for row in rows)))
        except BaseException as error:  # noqa: BLE001 - carried over to the thread that waits
            found.set_exception(error)

    Thread(target=look, name=f"look up {host}", daemon=True).start()
    if not wait([found], timeout_s).done:
        raise TimeoutError(f"the name {host!r} was not looked up")
    return found.result()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
