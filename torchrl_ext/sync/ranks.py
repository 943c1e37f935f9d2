"""What became of an update, told by the trainer rank that drives to those that only take part in the gathers."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter
from typing import Any

import torch

from torchrl_ext.errors import DeadlineError, NotConnectedError
from torchrl_ext.sync.sources import Outgoing

__all__ = ["Ranks"]

log = logging.getLogger("torchrl_ext")

_DEADLINE_S = 1800.0  # as long as torch's own ranks wait for each other in a gather over gloo
_SHORTEST_S, _LONGEST_S = 0.002, 0.1  # between two looks

_senders: Counter[str] = Counter()  # of each model, in this process


class Ranks:
    """One sender's word to its fellows, through the store of torch's process group.

    No collective: one that drives says what it has to say however its update ends, and waits for nobody. Fellows are
    the senders of the same model, in the order in which each process first used them: on ranks that do not drive nobody
    need repeat the transport, the mapper or the engine.
    """

    def __init__(self) -> None:
        self._name = ""
        self._updates = 0

    def next(self, source: Outgoing) -> str:
        """The name of this sender's next update, which sends ``source``; the same on every rank."""
        if not self._name:
            model = hashlib.sha256("\n".join(sorted(source.own_names())).encode()).hexdigest()[:32]
            self._name = f"torchrl_ext/{model}/{_senders[model]}"
            _senders[model] += 1
        self._updates += 1
        return f"{self._name}/{self._updates}"

    def tell(self, update: str, version: int, accepted: bool) -> None:
        """Say that an update is over, and which version the engines serve now; a store that is gone is logged."""
        store = _store()
        if store is None:
            return
        try:
            store.set(update, f"{version} {int(accepted)}")
        except RuntimeError as error:
            log.warning("the other trainer ranks were not told of weights version %d: %s", version, error)

    def hear(self, update: str) -> tuple[int, bool] | None:
        """Wait until an update is over.

        Returns:
            The version that the engines serve now, and whether this update put it in service; None where there are no
            other ranks.

        Raises:
            DeadlineError: the rank that drives said nothing.
            NotConnectedError: torch's store is gone.
        """
        store = _store()
        if store is None:
            return None
        until, pause = time.monotonic() + _DEADLINE_S, _SHORTEST_S
        try:
            while not store.check([update]):
                if time.monotonic() > until:
                    raise DeadlineError(
                        f"trainer rank 0 did not say within {_DEADLINE_S:g} s what became of an update",
                        expected="update_weights on every trainer rank, the same number of times",
                        state="this rank does not know which version the engines serve",
                        hint="look at rank 0; make the same senders in the same order on every rank",
                    )
                threading.Event().wait(pause)
                pause = min(2 * pause, _LONGEST_S)
            version, accepted = store.get(update).decode().split()
        except RuntimeError as error:
            if isinstance(error, DeadlineError):
                raise
            raise NotConnectedError(
                f"the store of torch's process group is gone: {error}",
                state="this rank does not know which version the engines serve",
                hint="look at trainer rank 0, which keeps it as a rule",
            ) from error
        return int(version), accepted == "1"


def _store() -> Any | None:
    """The store of the default process group; None where this process is the only rank."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    if torch.distributed.get_world_size() == 1:
        return None
    return torch.distributed.distributed_c10d._get_default_store()
