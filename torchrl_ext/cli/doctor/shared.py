"""What the checks of `torchrl-ext doctor` share: findings, and both sides of an update.

The trainer's side are its checkpoint, and probes of the shared root and the network.
"""

from __future__ import annotations

import json
import shutil
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError, StoreError, WeightSyncError
from torchrl_ext.messages import Inspect
from torchrl_ext.rpc.http import Answer, HTTPSession, normalise_url
from torchrl_ext.rpc.server_info import ServerInfo
from torchrl_ext.stores import Store, open_store
from torchrl_ext.transports.shared_root import Invitation, SharedRoot
from torchrl_ext.types import EngineInfo, Info, dtype_name
from torchrl_ext.weights.checkpoint import CheckpointSource

__all__ = [
    "Context",
    "Finding",
    "Trainer",
    "config_of",
    "failed",
    "failure",
    "ok",
    "own_address",
    "sizes_of",
    "warning",
]

_COPIES = 3
"""Full versions that lie in a root at the same time: the served one, the one being written, and a spare one."""
_FEW_BYTES = 1 << 30


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        level: ``"ok"``, ``"warning"`` (an update works, with a catch) or ``"failure"`` (an update would fail).
        check: the name of the check.
        found: the actual state.
        expected, remedy: the state that an update needs, and how to reach it; empty if the level is ``"ok"``.
        where: an engine's address, ``"trainer"`` or ``"fleet"``; set after the check.
    """

    level: str
    check: str
    found: str
    expected: str = ""
    remedy: str = ""
    where: str = ""


ok, warning, failure = (partial(Finding, level) for level in ("ok", "warning", "failure"))


def failed(check: str, error: WeightSyncError) -> Finding:
    """Return a failure with the error's texts."""
    return failure(check, error.what, error.expected or "", error.hint or "")


class Trainer:
    """The trainer's side: the settings of the update, and probes that engines look for.

    Args:
        transport: name of the transport that will be used; None if undecided.
        root: directory or URL that both sides must see; None if the transport writes no files.
        model: checkpoint directory where training starts; None if not given.
        api_key: sent to engines as a bearer token.
        timeout_s: deadline of each engine's discovery, in seconds.

    Attributes:
        sizes: bytes of the checkpoint by dtype; empty without one.
        question: for the engines' workers, within `probing`.
        findings: on the trainer's side.
    """

    def __init__(
        self, *, transport: str | None, root: str | None, model: str | None, api_key: str | None, timeout_s: float
    ) -> None:
        self.transport, self.root, self.model = transport, root, model
        self.api_key, self.timeout_s = api_key, timeout_s
        self.sizes: dict[str, int] = {}
        self.question = Inspect()
        self.findings: list[Finding] = []
        self._token = uuid.uuid4().hex
        self._store: Store | None = None
        if model is not None:
            try:
                self.sizes = sizes_of(model)
            except WeightSyncError as error:
                self.findings.append(failed("model", error))
            else:
                self.findings.append(ok("model", f"{_gb(sum(self.sizes.values()))}, {', '.join(self.sizes)}"))

    @contextmanager
    def probing(self, addresses: list[str]) -> Iterator[None]:
        """Keep a probe in the root, and for a collective a listener where engines reach this machine."""
        question: Info = {}
        with ExitStack() as ends:
            if self.root is not None:
                try:
                    question["root"] = ends.enter_context(self._probe(self.root))
                except (WeightSyncError, OSError) as error:
                    what = error.what if isinstance(error, WeightSyncError) else f"{self.root}: {error}"
                    remedy = "pick another root, or change its permissions"
                    self.findings.append(failure("shared root", what, "a root that the trainer can write to", remedy))
            if self.transport == "collective":
                question |= {"dial": ends.enter_context(self._listening(addresses)), "token": self._token}
            self.question = Inspect(**question)
            yield

    @contextmanager
    def _probe(self, root: str) -> Iterator[Info]:
        """Write a probe into the root, and remove it afterwards, with the directory if it was made for it."""
        self._store = store = open_store(root)
        folder = None if "://" in store.url else Path(store.url)
        made = folder if folder is not None and not folder.exists() else None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        shared = SharedRoot(store, self._token)
        try:
            invitation = shared.invite()
            self.findings.append(ok("shared root", f"the trainer can write to {store.url}"))
            if folder is not None:
                self.findings.append(self._space(folder))
            yield invitation
        finally:
            shared.clear()
            if made is not None:
                with suppress(OSError):  # somebody has put something there
                    made.rmdir()

    def _space(self, folder: Path) -> Finding:
        size, free = sum(self.sizes.values()), shutil.disk_usage(folder).free
        needed = _COPIES * size or _FEW_BYTES
        if free >= needed:
            return ok("disk space", f"{_gb(free)} free under {folder}")
        expected = f"{_gb(needed)}{' for three full versions' * bool(size)}"
        return (failure if size else warning)("disk space", f"{_gb(free)} free", expected, "use another root")

    @contextmanager
    def _listening(self, addresses: list[str]) -> Iterator[list[Any]]:
        """Listen where engines reach this machine, and yield the address."""
        host = own_address(addresses)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family, backlog=1024) as listener:
            threading.Thread(target=self._send_token, args=(listener,), name="listen", daemon=True).start()
            try:
                yield [host, listener.getsockname()[1]]
            finally:
                with suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept

    def _send_token(self, listener: socket.socket) -> None:
        """Send the token to every caller, which shows an engine that it reached this process."""
        while True:
            try:
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(2.0)
                    connection.sendall(self._token.encode())
            except TimeoutError:
                continue  # the caller does not read
            except OSError:
                return  # the listener was closed

    def judge_root(self, seen: Info, host: str, worker: str) -> Finding:
        """Return whether a worker on ``host`` sees the root as this machine does; ``seen`` is its answer."""
        here, there, why = f"{socket.gethostname()}:{self.root}", f"{host}:{self.root}{worker}", seen.get("why")
        if not seen.get("seen"):
            found = f"{there} does not contain the trainer's file: {why}"
            remedy = str(seen.get("remedy") or "mount it on both hosts under the same path")
            return failure("shared root", found, f"the same directory as {here}", remedy)
        if seen.get("probe") is None:
            return ok("shared root", f"the engine reads the root{worker}; it cannot write there, and need not ({why})")
        if self._finds(str(seen["probe"])):
            return ok("shared root", f"seen from both sides{worker}")
        found = f"a file that the engine wrote into {there} does not appear in {here}"
        remedy = "check the engine's side for an overlay, a read-only snapshot or a caching mount"
        return warning("shared root", found, "one directory, seen from both sides", remedy)

    def _finds(self, probe: str) -> bool:
        """Return whether an engine's probe shows up here, and remove it."""
        if self._store is None or not probe.startswith(".probe") or "/" in probe:
            return False
        offer = Invitation(root=str(self.root), probe=probe, run_id=self._token, trainer="the engine")
        try:
            offer.find(self._store, Deadline(2.0))
        except WeightSyncError:
            return False
        with suppress(StoreError):
            self._store.delete(probe)
        return True


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the checks of one engine look at.

    Attributes:
        trainer: the trainer's side.
        http: a session with the engine.
        info, facts: the engine's description of itself.
        date: the engine's first answer, and this machine's clock before and after it, in seconds since 1970.
        client: the engine's `torchrl_ext.EngineClient`.
        answers: of the workers (`torchrl_ext.sync.inspection`); empty if they gave none.
        refusal: why the workers gave no answer.
    """

    trainer: Trainer
    http: HTTPSession
    info: EngineInfo
    facts: ServerInfo
    date: tuple[Answer, float, float]
    client: Any
    answers: list[Info]
    refusal: WeightSyncError | None


def sizes_of(directory: str) -> dict[str, int]:
    """Return the bytes of a checkpoint directory's tensors by dtype, the most bytes first.

    Raises:
        WeightSyncError: this is no checkpoint directory.
    """
    sizes: dict[str, int] = {}
    for meta in CheckpointSource(directory).params():
        sizes[dtype_name(meta.dtype)] = sizes.get(dtype_name(meta.dtype), 0) + meta.nbytes
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def config_of(directory: str) -> dict[str, Any]:
    """Return ``config.json`` of a checkpoint directory; empty if this machine cannot read it."""
    try:
        config = json.loads((Path(directory) / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def own_address(addresses: list[str]) -> str:
    """Return this machine's address towards the first engine whose address can be looked up; else 127.0.0.1."""
    for address in addresses:
        with suppress(ConfigError, OSError):
            parts = urlsplit(normalise_url(address))
            found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
            family, kind, protocol, _, target = found[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # a datagram socket sends nothing yet
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"
