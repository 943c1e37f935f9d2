"""What `torchrl-ext doctor` looks at on the trainer's side and between both: options, the shared root, the group."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torchrl_ext.cli.doctor.findings import Examined, Finding
from torchrl_ext.errors import ConfigError, StoreError, WeightSyncError
from torchrl_ext.messages import Inspect
from torchrl_ext.rpc.http import normalise_url
from torchrl_ext.stores import Store, open_store
from torchrl_ext.transports.shared_root import SharedRoot
from torchrl_ext.types import Info

__all__ = ["SharedChecks", "check_checkpoint", "own_address"]

_COPIES = {"disk": 3, "delta": 3}
"""Full versions that lie in a root at the same time: the one in service, the one being written, and one to spare."""
_FEW_BYTES = 1 << 30
_SHAPE = ("architectures", "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")


class SharedChecks:
    """The trainer's ends of the probes, open while engines are asked.

    Args:
        root: directory or URL that both sides are to see; None where the transport writes no files.
        transport: name of the transport; None where none is decided on.
        model_bytes: of one full version; 0 where it is not known.
    """

    def __init__(self, root: str | None, transport: str | None, model_bytes: int = 0) -> None:
        self._root, self._transport, self._model_bytes = root, transport, model_bytes
        self._store: Store | None = None
        self._token = uuid.uuid4().hex
        self._invitation: Info | None = None
        self._listener: socket.socket | None = None
        self.findings: list[Finding] = []

    @contextmanager
    def asking(self, addresses: list[str]) -> Iterator[Inspect]:
        """The question for engines' workers; probes are gone when the block ends."""
        question: Info = {}
        shared: SharedRoot | None = None
        made: Path | None = None
        try:
            if self._root is not None:
                shared, made = self._open_root()
                if self._invitation is not None:
                    question["root"] = self._invitation
            if self._transport == "collective":
                question |= {"dial": self._listen(addresses), "token": self._token}
            yield Inspect(**question)
        finally:
            if shared is not None:
                shared.clear()
            if made is not None:
                with suppress(OSError):  # somebody has put something there
                    made.rmdir()
            if self._listener is not None:
                with suppress(OSError):
                    self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
                self._listener.close()

    def judge(self, every: list[Examined]) -> list[Finding]:
        """What the answers say; call it inside the block of `asking`."""
        found = []
        for one in every:
            for answer in one.answers:
                worker = f" (worker {answer['worker']})" if len(one.answers) > 1 and "worker" in answer else ""
                if isinstance(answer.get("root"), dict):
                    found.append(self._judge_root(one.address, answer, answer["root"], worker))
                if isinstance(answer.get("dial"), dict):
                    found.append(self._judge_dial(one.address, answer["dial"], worker))
            if self._root is not None and one.info is not None and not one.answers:
                found.append(
                    Finding(
                        where=one.address,
                        check="shared root",
                        level="warning",
                        found="the engine has no plugin that could look for the probe",
                        expected=f"{self._root} under the same path in the engine",
                        remedy="look there by hand, or install torchrl_ext in the engine's environment",
                    )
                )
        return found

    def forget(self, answer: Info) -> Inspect | None:
        """What to ask so that the probe which ``answer`` names is removed."""
        probe = answer["root"].get("probe") if isinstance(answer.get("root"), dict) else None
        return None if probe is None else Inspect(clear={"root": str(self._root), "probe": probe})

    # trainer's side

    def _open_root(self) -> tuple[SharedRoot | None, Path | None]:
        root, made = str(self._root), None
        try:
            self._store = open_store(root)
            folder = None if "://" in self._store.url else Path(self._store.url)
            if folder is not None and not folder.exists():
                folder.mkdir(parents=True)
                made = folder
            shared = SharedRoot(self._store, self._token)
            self._invitation = shared.invite()
        except (WeightSyncError, OSError) as error:
            self._note(
                "shared root",
                "failure",
                error.what if isinstance(error, WeightSyncError) else f"{root}: {error}",
                "a place that the trainer can write to",
                "pick another root, or mend its permissions",
            )
            return None, made
        self._note("shared root", "ok", f"the trainer can write to {self._store.url}")
        if folder is not None:
            self._space(folder)
        return shared, made

    def _space(self, folder: Path) -> None:
        free = shutil.disk_usage(folder).free
        needed = _COPIES.get(self._transport or "disk", 3) * self._model_bytes or _FEW_BYTES
        if free < needed:
            what = f"{_gb(needed)} for three full versions" if self._model_bytes else f"{_gb(needed)}"
            self._note("disk space", "failure" if self._model_bytes else "warning", f"{_gb(free)} free", what,
                       "free some space, or use another root")  # fmt: skip
        else:
            self._note("disk space", "ok", f"{_gb(free)} free under {folder}")

    def _listen(self, addresses: list[str]) -> list[Any]:
        host = own_address(addresses)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        threading.Thread(target=self._tell_who_dials, args=(self._listener,), name="listen", daemon=True).start()
        return [host, self._listener.getsockname()[1]]

    def _tell_who_dials(self, listener: socket.socket) -> None:
        """Engines say that they reached this process, and no other, once they have read the token."""
        while True:
            try:
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(2.0)
                    connection.sendall(self._token.encode())
            except TimeoutError:
                continue  # one that does not read
            except OSError:
                return  # it was closed: every engine has answered

    # both sides

    def _judge_root(self, address: str, answer: Info, told: Info, worker: str) -> Finding:
        here, there = f"{socket.gethostname()}:{self._root}", f"{answer.get('host')}:{self._root}"
        if not told.get("seen"):
            return Finding(
                where=address,
                check="shared root",
                level="failure",
                found=f"{there}{worker} does not hold what the trainer wrote: {told.get('why')}",
                expected=f"the same directory as {here}",
                remedy="mount it on both hosts under the same path; a path that only the trainer sees is not enough",
            )
        if told.get("probe") is None:
            why = f"the engine reads the root{worker}, and cannot write there ({told.get('why')}), which it need not"
            return Finding(where=address, check="shared root", level="ok", found=why)
        if not self._comes_back(str(told["probe"])):
            return Finding(
                where=address,
                check="shared root",
                level="warning",
                found=f"what the engine wrote into {there}{worker} does not show up in {here}",
                expected="one directory, seen from both sides",
                remedy="look for an overlay, a read-only snapshot or a caching mount on the engine's side",
            )
        return Finding(where=address, check="shared root", level="ok", found=f"seen from both sides{worker}")

    def _comes_back(self, probe: str) -> bool:
        if self._store is None or not probe.startswith(".probe") or "/" in probe:
            return False
        theirs = SharedRoot(self._store, self._token)
        info = {"root": self._root, "probe": probe, "run_id": self._token, "host": "the engine"}
        try:
            theirs.find(info, timeout_s=2.0, aborted=threading.Event())
        except WeightSyncError:
            return False
        with suppress(StoreError):
            self._store.delete(probe)
        return True

    def _judge_dial(self, address: str, told: Info, worker: str) -> Finding:
        if told.get("reached"):
            return Finding(where=address, check="group", level="ok", found=f"the engine can reach the trainer{worker}")
        return Finding(
            where=address,
            check="group",
            level="failure",
            found=f"the engine cannot reach the trainer{worker}: {told.get('why')}",
            expected="a connection from every worker to the trainer, where a process group meets",
            remedy="open the way, name another interface in master_address, or use a shared root",
        )

    def _note(self, check: str, level: str, found: str, expected: str = "", remedy: str = "") -> None:
        self.findings.append(
            Finding(where="trainer", check=check, level=level, found=found, expected=expected, remedy=remedy)
        )


def check_checkpoint(directory: str, every: list[Examined]) -> tuple[list[Finding], int]:
    """The trainer's checkpoint beside what engines serve; findings, and the bytes of a full version."""
    from torchrl_ext.types import dtype_name
    from torchrl_ext.weights.checkpoint import CheckpointSource

    try:
        params = CheckpointSource(directory).params()
    except WeightSyncError as error:
        remedy = error.hint or "name the checkpoint that training starts from"
        return [Finding(where="trainer", check="model", level="failure", found=error.what, remedy=remedy)], 0
    size = sum(meta.nbytes for meta in params)
    weight = {dtype_name(meta.dtype): 0 for meta in params}
    for meta in params:
        weight[dtype_name(meta.dtype)] += meta.nbytes
    dtype = max(weight, key=lambda name: weight[name])
    found = [Finding(where="trainer", check="model", level="ok", found=f"{len(params)} tensors, {_gb(size)}, {dtype}")]
    own = _config(directory)
    for one in every:
        if one.info is None:
            continue
        theirs = _config(one.info.model)
        other = [key for key in _SHAPE if key in own and key in theirs and own[key] != theirs[key]]
        if other:
            told = ", ".join(f"{key} {theirs[key]}" for key in other)
            wanted = ", ".join(f"{key} {own[key]}" for key in other)
            remedy = "start the engine with the trainer's checkpoint, or name another one"
            found.append(
                Finding(where=one.address, check="model", level="failure", found=told, expected=wanted, remedy=remedy)
            )
        if one.dtype not in ("", "auto", dtype):
            remedy = f"start the engine with --dtype {dtype}, or send with WeightSender(dtype=torch.{one.dtype})"
            told, wanted = f"the engine computes in {one.dtype}", f"{dtype}, as the checkpoint"
            found.append(
                Finding(where=one.address, check="dtype", level="warning", found=told, expected=wanted, remedy=remedy)
            )
    return found, size


def _config(directory: str) -> dict[str, Any]:
    """``config.json`` where this machine can see it."""
    try:
        told = json.loads((Path(directory) / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def own_address(addresses: list[str]) -> str:
    """The address of this machine on the way to the first engine whose address can be looked up."""
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
