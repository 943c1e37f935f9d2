"""Runs the other ranks of the demo's trainer, which take each step and each update together with rank 0."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from tensordict import set_list_to_stack
from torch import distributed as dist

from torchrl_ext.cli.demo.training import Trainer, quiet
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import TransportError, WeightSyncError, why
from torchrl_ext.serving.processes import GuardedProcess

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["RankSpec", "main", "trainer_ranks"]

_WAIT_S, _END_S = 180.0, 5.0
_IDLE_S = 86400.0  # between steps; a rank ends when rank 0 does


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """The settings that the ranks of a trainer share.

    Attributes:
        ranks: their number.
        steps: training steps, each followed by an update, as is the start.
        store: file where the ranks meet, which needs no port; only this user may read its folder.
        model_dir: checkpoint where training starts.
        seed: of the minibatches.
        transport: name of the transport.
        settings: of the transport.
        verify: as for `torchrl_ext.WeightSender`.
        threads: threads of one operator; None keeps torch's default.
    """

    ranks: int
    steps: int
    store: str
    model_dir: str
    seed: int
    transport: str
    settings: dict[str, Any]
    verify: bool | str = True
    threads: int | None = None

    def join(self, rank: int, timeout_s: float) -> DeviceMesh:
        """Join the process group as ``rank``, and return the mesh of all ranks."""
        store = dist.FileStore(self.store, self.ranks)  # type: ignore[attr-defined]  # not in the stub
        wait = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=self.ranks, timeout=wait)
        return dist.device_mesh.init_device_mesh("cpu", (self.ranks,))


@contextmanager
def trainer_ranks(spec: RankSpec) -> Iterator[DeviceMesh | None]:
    """Run the other ranks beside the block, and yield the mesh of all ranks; None if there is only one.

    Raises:
        TransportError: a rank ended early (the message says why), or training failed.
    """
    if spec.ranks == 1:
        yield None
        return
    with ExitStack() as ends:
        others = [ends.enter_context(_started(spec, rank)) for rank in range(1, spec.ranks)]
        try:
            yield spec.join(0, _WAIT_S)
            dist.barrier()
        except Exception as error:
            for _ in Deadline(_END_S).pauses():  # connections break a moment before the end of their process is seen
                for one in others:
                    if not one.alive():
                        raise TransportError(
                            f"{one.name} ended; it printed: {one.errors() or one.log()[-1000:] or 'nothing'}",
                            state="the other ranks were ended",
                            hint="run the same command with --trainer-ranks 1 to see whether training itself works",
                        ) from error
            if isinstance(error, WeightSyncError) or not isinstance(error, RuntimeError):
                raise
            what = f"training on {spec.ranks} ranks failed: {why(error)}"
            raise TransportError(what, state="the other ranks were ended") from error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _started(spec: RankSpec, rank: int) -> GuardedProcess:
    command = [sys.executable, "-m", "torchrl_ext.cli.demo.ranks", str(rank), json.dumps(asdict(spec))]
    return GuardedProcess(command, name=f"trainer rank {rank}", log_path=f"{spec.store}{rank}.log")


def main(rank: int, spec: RankSpec) -> None:
    """Train and update on a rank other than 0, with rank 0's rollouts."""
    import torchrl_ext as tx

    quiet()
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    trainer = Trainer(spec.model_dir, seed=spec.seed, mesh=spec.join(rank, _IDLE_S))
    sender = tx.WeightSender(tx.make_transport(spec.transport, **spec.settings), rank=rank, verify=spec.verify)
    sender.register_model(trainer.model)
    for step in range(spec.steps + 1):
        if step > 0:
            with set_list_to_stack(True):  # as on rank 0
                trainer.step()
        with suppress(WeightSyncError):  # rank 0 raises it as well
            sender.update_weights()
    trainer.whole()
    dist.barrier()
    sender.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), RankSpec(**json.loads(sys.argv[2])))
