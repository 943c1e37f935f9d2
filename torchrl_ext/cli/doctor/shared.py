"""Checks for `torchrl-ext doctor` what the trainer has and shares with engines: checkpoint, shared root, group."""

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

from torchrl_ext.cli.doctor.findings import Examined, Notes
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError, StoreError, WeightSyncError
from torchrl_ext.messages import Inspect
from torchrl_ext.rpc.http import normalise_url
from torchrl_ext.stores import Store, open_store
from torchrl_ext.transports.shared_root import Invitation, SharedRoot
from torchrl_ext.types import Info, cast_hint, dtype_from_name, dtype_name

__all__ = ["SharedChecks", "compare_checkpoint", "compare_own_checkpoint", "own_address", "read_checkpoint"]

_COPIES = 3
"""Full versions that lie in a root at the same time: the one in service, the one being written, and one to spare."""
_FEW_BYTES = 1 << 30
_SHAPE = ("architectures", "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")


class SharedChecks:
    """Probes the shared root and the network from the trainer's side, while engines probe them from theirs.

    Args:
        root: directory or URL that both sides are to see; None where the transport writes no files.
        transport: name of the transport; None where none is decided on.
        model_bytes: of one full version; 0 where it is not known.
        notes: takes what is found on the trainer's side.
    """

    def __init__(self, root: str | None, transport: str | None, model_bytes: int, notes: Notes) -> None:
        self._root, self._transport, self._model_bytes, self._notes = root, transport, model_bytes, notes
        self._store: Store | None = None
        self._token = uuid.uuid4().hex

    @contextmanager
    def asking(self, addresses: list[str]) -> Iterator[Inspect]:
        """Yield the question for engines' workers; probes are gone when the block ends."""
        question: Info = {}
        shared: SharedRoot | None = None
        made: Path | None = None
        listener: socket.socket | None = None
        try:
            if self._root is not None:
                shared, made = self._open_root(question)
            if self._transport == "collective":
                host = own_address(addresses)
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                listener = socket.create_server((host, 0), family=family, backlog=1024)
                threading.Thread(target=self._tell_who_dials, args=(listener,), name="listen", daemon=True).start()
                question |= {"dial": [host, listener.getsockname()[1]], "token": self._token}
            yield Inspect(**question)
        finally:
            if shared is not None:
                shared.clear()
            if made is not None:
                with suppress(OSError):  # somebody has put something there
                    made.rmdir()
            if listener is not None:
                with suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
                listener.close()

    def judge(self, one: Examined) -> None:
        """Note what an engine's answers say; call it inside the block of `asking`."""
        notes = one.notes
        for answer in one.answers:
            worker = f" (worker {answer['worker']})" if len(one.answers) > 1 and "worker" in answer else ""
            if isinstance(answer.get("root"), dict):
                self._judge_root(notes, answer, answer["root"], worker)
            dialled = answer.get("dial")
            if isinstance(dialled, dict) and dialled.get("reached"):
                notes.ok("group", f"the engine can reach the trainer{worker}")
            elif isinstance(dialled, dict):
                notes.failure(
                    "group",
                    f"the engine cannot reach the trainer{worker}: {dialled.get('why')}",
                    "a connection from every worker to the trainer, where a process group meets",
                    "open the way, name another interface in master_address, or use a shared root",
                )
        if self._root is not None and one.info is not None and not one.answers:
            notes.warning(
                "shared root",
                "the engine has no plugin that could look for the probe",
                f"{self._root} under the same path in the engine",
                "look there by hand, or install torchrl_ext in the engine's environment",
            )

    def forget(self, answer: Info) -> Inspect | None:
        """Return the request to remove the probe that ``answer`` names; None where it names none."""
        probe = answer["root"].get("probe") if isinstance(answer.get("root"), dict) else None
        return None if probe is None else Inspect(clear={"root": str(self._root), "probe": probe})

    # trainer's side

    def _open_root(self, question: Info) -> tuple[SharedRoot | None, Path | None]:
        """Return the trainer's end of the probe, and a directory that was made for it; either may be None."""
        root, made = str(self._root), None
        try:
            self._store = open_store(root)
            folder = None if "://" in self._store.url else Path(self._store.url)
            if folder is not None and not folder.exists():
                folder.mkdir(parents=True)
                made = folder
            shared = SharedRoot(self._store, self._token)
            question["root"] = shared.invite()
        except (WeightSyncError, OSError) as error:
            self._notes.failure(
                "shared root",
                error.what if isinstance(error, WeightSyncError) else f"{root}: {error}",
                "a place that the trainer can write to",
                "pick another root, or mend its permissions",
            )
            return None, made
        self._notes.ok("shared root", f"the trainer can write to {self._store.url}")
        if folder is not None:
            self._space(folder)
        return shared, made

    def _space(self, folder: Path) -> None:
        free = shutil.disk_usage(folder).free
        needed = _COPIES * self._model_bytes or _FEW_BYTES
        if free < needed:
            what = f"{_gb(needed)} for three full versions" if self._model_bytes else f"{_gb(needed)}"
            note = self._notes.failure if self._model_bytes else self._notes.warning
            note("disk space", f"{_gb(free)} free", what, "free some space, or use another root")
        else:
            self._notes.ok("disk space", f"{_gb(free)} free under {folder}")

    def _tell_who_dials(self, listener: socket.socket) -> None:
        """Send the token to whoever connects: with it an engine knows that it reached this process, and no other."""
        while True:
            try:
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(2.0)
                    connection.sendall(self._token.encode())
            except TimeoutError:
                continue  # whoever connected does not read
            except OSError:
                return  # it was closed: every engine has answered

    # both sides

    def _judge_root(self, notes: Notes, answer: Info, told: Info, worker: str) -> None:
        here, there = f"{socket.gethostname()}:{self._root}", f"{answer.get('host')}:{self._root}"
        if not told.get("seen"):
            notes.failure(
                "shared root",
                f"{there}{worker} does not hold what the trainer wrote: {told.get('why')}",
                f"the same directory as {here}",
                "mount it on both hosts under the same path; a path that only the trainer sees is not enough",
            )
        elif told.get("probe") is None:
            why = f"the engine reads the root{worker}, and cannot write there ({told.get('why')}), which it need not"
            notes.ok("shared root", why)
        elif self._comes_back(str(told["probe"])):
            notes.ok("shared root", f"seen from both sides{worker}")
        else:
            notes.warning(
                "shared root",
                f"what the engine wrote into {there}{worker} does not show up in {here}",
                "one directory, seen from both sides",
                "look for an overlay, a read-only snapshot or a caching mount on the engine's side",
            )

    def _comes_back(self, probe: str) -> bool:
        if self._store is None or not probe.startswith(".probe") or "/" in probe:
            return False
        offer = Invitation(root=str(self._root), probe=probe, run_id=self._token, host="the engine")
        try:
            offer.find(self._store, Deadline(2.0))
        except WeightSyncError:
            return False
        with suppress(StoreError):
            self._store.delete(probe)
        return True


def read_checkpoint(directory: str, notes: Notes) -> tuple[int, str]:
    """Return the bytes of the trainer's checkpoint, and the dtype of most of it; 0 and "" where there is none."""
    from torchrl_ext.weights.checkpoint import CheckpointSource

    try:
        params = CheckpointSource(directory).params()
    except WeightSyncError as error:
        notes.failure("model", error.what, "", error.hint or "name the checkpoint that training starts from")
        return 0, ""
    weight: dict[str, int] = {}
    for meta in params:
        weight[dtype_name(meta.dtype)] = weight.get(dtype_name(meta.dtype), 0) + meta.nbytes
    size, dtype = sum(weight.values()), max(weight, key=lambda name: weight[name])
    notes.ok("model", f"{len(params)} tensors, {_gb(size)}, {dtype}")
    return size, dtype


def compare_checkpoint(directory: str, dtype: str, one: Examined) -> None:
    """Note where an engine serves another model than the trainer's checkpoint, or computes in another dtype."""
    own, theirs = _config(directory), _config(one.info.model) if one.info is not None else {}
    other = [key for key in _SHAPE if key in own and key in theirs and own[key] != theirs[key]]
    if other:
        told, wanted = (", ".join(f"{key} {config[key]}" for key in other) for config in (theirs, own))
        one.notes.failure("model", told, wanted, "start the engine with the trainer's checkpoint, or name another one")
    if one.dtype not in ("", "auto", dtype):
        found = f"the engine computes in {one.dtype}: it refuses weights of another dtype, or rounds them"
        one.notes.warning("dtype", found, f"{dtype}, as in {directory}", cast_hint(dtype_from_name(one.dtype)))


def compare_own_checkpoint(one: Examined) -> None:
    """Note where an engine computes in another dtype than its checkpoint, from which a trainer may start as well."""
    if one.info is None or not Path(one.info.model).is_dir():
        return
    _, dtype = read_checkpoint(one.info.model, Notes(one.address))
    if dtype:
        compare_checkpoint(one.info.model, dtype, one)


def _config(directory: str) -> dict[str, Any]:
    """Return ``config.json`` of a checkpoint; empty where this machine cannot see it."""
    try:
        told = json.loads((Path(directory) / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


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
