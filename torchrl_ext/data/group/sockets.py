"""TCP sockets by which ranks reach the trainer."""

from __future__ import annotations

import errno
import ipaddress
import socket
from functools import partial

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.data.group.calls import in_time

__all__ = ["dial", "listen"]

_BACKLOG = 1024
_PAUSE_S, _SLICE_S = 0.001, 0.05


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens where workers reach this process.

    Args:
        address: an IP address of this machine, or ``localhost``, is the only one listened at; a name or another address
            may be that of a proxy, so all of this machine's are listened at.
        port: 0 picks a free one.

    Raises:
        OSError: the port is taken.
    """
    try:
        numeric = ipaddress.ip_address("127.0.0.1" if address == "localhost" else address)
        family = socket.AF_INET if numeric.version == 4 else socket.AF_INET6
        return socket.create_server((str(numeric), port), family=family, backlog=_BACKLOG)
    except ValueError:
        pass  # a name
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", port), backlog=_BACKLOG)


def dial(address: str, port: int, within: Deadline, failure: str = "no attempt was made") -> socket.socket:
    """Return a connection to the process that listens at this address and port, as soon as one does.

    Args:
        failure: why the attempt before failed, for the error.

    Raises:
        DeadlineError: nobody does in time.
        TransportError: another thread ended the wait.
    """
    for left_s in within.pauses(shortest_s=_PAUSE_S, longest_s=_SLICE_S):
        try:
            made = in_time(partial(socket.create_connection, (address, port), max(0.1, left_s)), within)
        except OSError as error:  # nobody listens; or the name is not known, and that of a service may be, soon
            failure = str(error)
        else:
            if made:
                return made[0]
    raise within.error(
        f"no trainer (rank 0) listened at {address}:{port} ({failure})",
        expected="the trainer calls init_all_workers_group (or open) at the same time",
        state="no group was joined",
        hint="check master_address and master_port",
    )
