"""Sources of a fleet's members, for ``members=`` of `torchrl_ext.connect` and `torchrl_ext.rpc.pool.Pool`.

A source is any function without arguments that returns addresses, or clients, of the engines that should take part. A
fleet calls it before each update, in a thread. If it raises, nothing changes.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Collection
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from torchrl_ext.errors import ConfigError
from torchrl_ext.rpc.http import Keys, normalise_url
from torchrl_ext.rpc.roster import Source
from torchrl_ext.rpc.router import RouterClient

__all__ = ["Source", "from_dns", "from_file", "from_router"]

log = logging.getLogger("torchrl_ext")


def from_file(path: str | os.PathLike[str]) -> Source:
    """Return the source that reads a file: a JSON list of addresses, or one address per line, without ``#`` comments.

    Replace the file by a rename, because a file that is half written lists only some of the engines.
    """
    return partial(_listed, Path(path))


def _listed(path: Path) -> list[str]:
    text = path.read_text()
    if not text.lstrip().startswith("["):
        return [line for line in (line.partition("#")[0].strip() for line in text.splitlines()) if line]
    found = json.loads(text)
    if not all(isinstance(one, str) for one in found):
        raise ConfigError(f"{path} lists {found!r:.200}", expected="a JSON list of addresses")
    return list(found)


def from_router(url: str, *, hosts: Collection[str] = (), api_key: Keys = None) -> Source:
    """Return the source that asks a router (vLLM's or SGLang's) for its workers, healthy or not.

    Whoever reaches a router may add workers to it. Those that are neither on its own host nor on one of ``hosts`` get
    neither a key nor weights; the log names them.

    For the router of a `torchrl_ext.serving.routing.Routing`, take `Routing.fleet` instead, which also lists engines
    that are out of the router because an update has yet to reach them.

    Raises:
        ConfigError: the address is invalid.
    """
    router, strangers = RouterClient(url, api_key=api_key, timeout_s=2.0), set[str]()
    return partial(_routed, router, {_host(router.url), *(host.strip("[]").lower() for host in hosts)}, strangers)


def _routed(router: RouterClient, hosts: Collection[str], strangers: set[str]) -> list[str]:
    urls = [worker.url for worker in router.workers()]
    new = {url for url in urls if _host(url) not in hosts} - strangers
    strangers |= new
    for url in sorted(new):
        log.warning("%s lists %s, which nobody named: it takes no part unless hosts= has it", router.url, url)
    return [url for url in urls if _host(url) in hosts]


def _host(url: str) -> str:
    return urlsplit(normalise_url(url)).hostname or ""


def from_dns(host: str, port: int, *, scheme: str = "http") -> Source:
    """Return the source that resolves a name with several addresses, such as a headless service of Kubernetes.

    A Service lists a pod once it is ready; ``publishNotReadyAddresses: true`` lists it while it starts.
    """
    return partial(_resolved, host, port, scheme)


def _resolved(host: str, port: int, scheme: str) -> list[str]:
    found = sorted({str(place[4][0]) for place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})
    return [f"{scheme}://{f'[{one}]' if ':' in one else one}:{port}" for one in found]
