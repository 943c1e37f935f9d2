"""The ranks of the demo's trainer: its own process is rank 0 and starts the others, which do as it says.

Run as ``python -m torchrl_ext.cli.demo.ranks SEAT``, where SEAT is the JSON of a `Seat`. Orders go through the store of
the process group, which is a file, and rollouts through another file. Both lie in a folder that only this user can
read, so nobody else can give orders.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import distributed as dist

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError, DeadlineError, TransportError, WeightSyncError, why
from torchrl_ext.serving.processes import GuardedProcess

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self

__all__ = ["GROUP", "Seat", "Team", "main"]

GROUP: Final = 16
"""Generations per prompt."""

_START_S, _ANSWER_S, _END_S = 180.0, 180.0, 5.0
_IDLE_S = 86400.0  # between orders; a rank whose rank 0 is gone is ended by its guard
_SHORTEST_S, _LONGEST_S = 0.001, 0.05
_ROLLOUTS: Final = "rollouts.safetensors"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seat:
    """What one rank of the demo's trainer has to know.

    Attributes:
        rank: its number.
        ranks: how many there are.
        folder: where the ranks meet, readable for nobody else.
        model_dir: checkpoint where training starts.
        seed: of the minibatches.
        transport: name of the transport.
        settings: of the transport, JSON-safe.
        verify: how engines prove what they took, as for a sender.
        threads: threads of one operator; None leaves torch's default.
    """

    rank: int = 0
    ranks: int
    folder: str
    model_dir: str
    seed: int
    transport: str
    settings: dict[str, Any]
    verify: bool | str = True
    threads: int | None

    def meet(self, store: Any, timeout_s: float) -> DeviceMesh:
        """Join the process group of the ranks, and return the mesh that they are."""
        wait = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.ranks, timeout=wait)
        return dist.device_mesh.init_device_mesh("cpu", (self.ranks,))

    def store(self) -> Any:
        """Return the store where the ranks meet: a file, which needs no port and has no strangers."""
        path = str(Path(self.folder) / "store")
        return dist.FileStore(path, self.ranks)  # type: ignore[attr-defined]  # left out of the stub


class Team:
    """The other ranks of the demo's trainer, as processes that last as long as a ``with`` block.

    The block is run by rank 0. Where another rank ends, or cannot be reached, so does the block, with an error that
    tells why that rank ended.

    Args:
        seat: of rank 0; where there is no other rank, a team does nothing.

    Attributes:
        seat: of rank 0.
    """

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self._others: list[GuardedProcess] = []
        self._orders = 0

    def __enter__(self) -> Self:
        try:
            for rank in range(1, self.seat.ranks):
                seat = dataclasses.replace(self.seat, rank=rank)
                self._others.append(
                    GuardedProcess(
                        [sys.executable, "-m", "torchrl_ext.cli.demo.ranks", json.dumps(dataclasses.asdict(seat))],
                        name=f"trainer rank {rank}",
                        log_path=Path(seat.folder) / f"rank{rank}.log",
                        environ={"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
                    )
                )
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        ended = ""
        try:
            if isinstance(error, Exception) and not isinstance(error, ConfigError) and self._others:
                ended = self._cause()
        finally:
            self._stop()
        if ended:
            raise TransportError(ended, state="the other ranks were ended", hint=_HINT) from error
        if self._others and isinstance(error, RuntimeError) and not isinstance(error, WeightSyncError):
            what = f"training on {self.seat.ranks} ranks failed: {why(error)}"
            raise TransportError(what, state="the other ranks were ended") from error

    def meet(self) -> DeviceMesh | None:
        """Wait until every rank is there, and return the mesh that they are; None where there is only one.

        Raises:
            TransportError: a rank ended.
            DeadlineError: a rank did not come in time.
        """
        if not self._others:
            return None
        store = self.seat.store()
        keys = [f"here/{rank}" for rank in range(1, self.seat.ranks)]

        def late() -> DeadlineError:
            missing = [key.partition("/")[2] for key in keys if not store.check([key])]
            return DeadlineError(f"trainer rank(s) {', '.join(missing)} did not start within {_START_S:g} s")

        Deadline(_START_S).poll(lambda: self._alive() and store.check(keys), late=late, longest_s=_LONGEST_S)
        return self.seat.meet(store, _ANSWER_S)

    def tell(self, order: str, rollouts: Any = None) -> None:
        """Let the other ranks do what rank 0 does next: ``"step"``, ``"update"``, ``"whole"`` or ``"end"``.

        Args:
            order: what.
            rollouts: for a step. Ranks read them before their part of it, so the last ones have been read by now.

        Raises:
            TransportError: a rank ended.
        """
        if not self._others:
            return
        self._alive()
        if rollouts is not None:
            from torchrl_ext.cli.demo.training import write_rollouts

            write_rollouts(Path(self.seat.folder) / _ROLLOUTS, rollouts)
        self._orders += 1
        _store().set(f"order/{self._orders}", order)

    def end(self) -> None:
        """Let the other ranks end by themselves.

        Raises:
            DeadlineError: one does not.
        """
        self.tell("end")
        for one in self._others:
            if not one.wait(_ANSWER_S):
                raise DeadlineError(f"{one.name} did not end within {_ANSWER_S:g} s", state="it was ended")
            one.stop()
        self._others.clear()

    def _alive(self) -> bool:
        """Return True.

        Raises:
            TransportError: a rank ended.
        """
        for one in self._others:
            if not one.alive():
                raise TransportError(_end_of(one))
        return True

    def _cause(self) -> str:
        """Return why a rank ended; empty where all run."""
        for _ in Deadline(_END_S).pauses():  # its connections break a moment before its guard has seen its end
            for one in self._others:
                if not one.alive():
                    return _end_of(one)
        return ""

    def _stop(self) -> None:
        for one in self._others:
            one.stop()
        if self.seat.ranks > 1 and dist.is_initialized():
            dist.destroy_process_group()


_HINT = "run the same command with --trainer-ranks 1 to see whether training itself works"


def _end_of(one: GuardedProcess) -> str:
    return f"{one.name} ended; what it printed: {one.errors() or one.log()[-1000:] or 'nothing'}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def main() -> int:
    """Be one of the other ranks: train and update as rank 0 says, until it says that this is the end."""
    seat = Seat(**json.loads(sys.argv[1]))
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(message)s")
    from tensordict import set_list_to_stack

    import torchrl_ext as tx
    from torchrl_ext.cli.demo.training import Trainer, read_rollouts

    if seat.threads is not None:
        torch.set_num_threads(seat.threads)
    store = seat.store()
    store.set(f"here/{seat.rank}", "")
    trainer = Trainer(seat.model_dir, group=GROUP, seed=seat.seed, mesh=seat.meet(store, _IDLE_S))
    sender = tx.WeightSender(tx.make_transport(seat.transport, **seat.settings), rank=seat.rank, verify=seat.verify)
    sender.register_model(trainer.model)
    orders = 0
    with set_list_to_stack(True):  # as on rank 0
        while True:
            orders += 1
            match _order(orders):
                case "step":
                    trainer.step(read_rollouts(Path(seat.folder) / _ROLLOUTS))
                case "update":
                    try:
                        sender.update_weights()
                    except WeightSyncError as error:  # rank 0 knows, and says what is next, if anything
                        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                case "whole":
                    trainer.whole()
                case _:
                    break
    sender.shutdown()
    dist.destroy_process_group()
    return 0


def _order(number: int) -> str:
    """Return rank 0's order of this number, when it has given it."""
    store, key = _store(), f"order/{number}"
    Deadline(_IDLE_S).poll(
        lambda: store.check([key]), "trainer rank 0 gave no order", shortest_s=_SHORTEST_S, longest_s=_LONGEST_S
    )
    return str(store.get(key).decode())


if __name__ == "__main__":
    sys.exit(main())
