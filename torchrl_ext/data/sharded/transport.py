"""`ShardedTransport` sends each worker the slices that it needs, from the trainer ranks that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import ConfigError, TransportError
from torchrl_ext.base.types import Info, ParamMeta
from torchrl_ext.data.group.backends import carrier_of, choose_backend
from torchrl_ext.data.group.group import GroupOffer, Member
from torchrl_ext.data.group.ranks import Steps
from torchrl_ext.data.sharded.trainer import ShardedTrainer
from torchrl_ext.data.sharded.worker import ShardedWorker
from torchrl_ext.data.transports.base import Abilities, Arrival, Handoff, Update, Worker
from torchrl_ext.data.transports.standalone import StandaloneTransport
from torchrl_ext.data.weights.source import WeightSource

__all__ = ["ShardedTransport"]


class ShardedTransport(StandaloneTransport):
    """Sends each worker its slices, straight from the trainer ranks that hold them: no gather, no full tensor.

    Every rank of the trainer (of torch's process group, or a single process without a group) creates a transport, and
    calls `update_weights` or `send_weights`. Ranks report to rank 0 the blocks that they hold (`WeightSource.shards`),
    workers the blocks that they need, and every member makes the same transfer plan of them.

    Args:
        master_address: address of trainer rank 0, as workers and other trainer ranks reach it.
        master_port: port of its store; 0 picks a free one, which a control layer passes on.
        worker: without a control layer, the number of this worker, 0 to ``workers - 1``; None for a trainer rank.
        workers: without a control layer, the number of workers.
        device: device of the tensors that are sent and received; by default this thread's accelerator, or the CPU
            without one.
        backend: ``"nccl"``, ``"xccl"``, ``"hccl"`` or ``"gloo"``; by default that of the device.
        bucket_bytes: largest number of bytes that a trainer rank sends, and a worker receives, in one round; two rounds
            overlap. None takes 8 MiB over gloo, and 256 MiB between devices.
        secret: as in `VLLMCollectiveTransport`.
        timeout_s: deadline of every wait, in seconds.

    Raises:
        ConfigError: the settings are invalid.

    Example:
        >>> from threading import Thread
        >>> trainer = tx.ShardedTransport("127.0.0.1", port, workers=1)
        >>> worker = tx.ShardedTransport("127.0.0.1", port, worker=0, workers=1)
        >>> shapes = {"weight": (torch.float32, (2, 4)), "bias": (torch.float32, (2,))}
        >>> beside = Thread(target=lambda: (trainer.init_all_workers_group(shapes), trainer.send_weights(policy)))
        >>> beside.start()
        >>> worker.init_all_workers_group(shapes)
        >>> received = worker.receive_weights(timeout=30.0)
        >>> beside.join()
        >>> bool((received["weight"] == policy.weight).all())
        True
    """

    name: ClassVar[str] = "sharded"
    abilities: ClassVar[Abilities] = Abilities(digests=True, slices=True, gathers=False)

    def __init__(
        self,
        master_address: str = "127.0.0.1",
        master_port: int = 0,
        worker: int | None = None,
        workers: int | None = None,
        device: torch.device | str | int | None = None,
        *,
        backend: str | None = None,
        bucket_bytes: int | None = None,
        secret: str = "",
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        chosen, made = choose_backend(device, backend)
        if bucket_bytes is None:
            bucket_bytes = carrier_of(made).sizes.bucket_bytes
        if bucket_bytes < 1 or not timeout_s > 0 or not 0 <= int(master_port) < 1 << 16:
            raise ConfigError(
                f"bucket_bytes={bucket_bytes}, timeout_s={timeout_s}, master_port={master_port}",
                expected="1 or more; more than 0; 0 to 65535",
            )
        if worker is not None and not 0 <= worker < (worker + 1 if workers is None else workers):
            raise ConfigError(f"worker {worker} does not exist among {workers}", expected="0 to workers - 1")
        member = Member(master_address, int(master_port), secret, device=chosen, backend=made, timeout_s=timeout_s)
        self._workers, self._number = workers, worker
        self._trainer = ShardedTrainer(member, lambda: self.ranks, bucket_bytes)
        self._worker = ShardedWorker(member)

    # forming the group

    def init_all_workers_group(self, model_metadata: Mapping[str, tuple[Any, Any]]) -> None:
        """Form the group without a control layer; every trainer rank and every worker calls this at the same time.

        Args:
            model_metadata: ``{name: (dtype, shape)}``, the same everywhere; empty to agree on nothing.

        Raises:
            DeadlineError: ranks, which the message names, did not arrive within `timeout_s`.
            ManifestError: ranks disagree on a parameter, which the message names.
        """
        params = tuple(ParamMeta(name, dtype, tuple(shape)) for name, (dtype, shape) in model_metadata.items())
        within = self._within = Deadline(self.timeout_s, "the other ranks")
        if self._number is not None:
            self._worker.enter(1 + self._number, None, params, within)
            self._end = self._worker
        elif self.ranks.drives:
            with self.ranks.leading():
                self._open(self._standalone_workers(), params, private=False).transfer(within)
        else:
            forever = Deadline(float("inf"), stop=within.stop)
            self.ranks.following(lambda: self._trainer.steps(None), forever)

    def open(self, workers: int, params: tuple[ParamMeta, ...], within: Deadline) -> Handoff:
        """See `Transport.open`; 0 workers (no control layer) means those that call `init_all_workers_group`.

        Raises:
            TransportError: this is not trainer rank 0, or the port is taken.
        """
        self._require_driver("open")
        if workers == 0 and self.check_connection():
            return Handoff()
        return self._open(workers or self._standalone_workers(), params, private=workers > 0)

    def _open(self, workers: int, params: tuple[ParamMeta, ...], *, private: bool) -> Handoff:
        offer = self._trainer.member.open(workers + self.ranks.size, private=private)
        return Handoff(info=offer.to_json(), transfer=lambda within: self._trainer.host(offer, workers, params, within))

    def _standalone_workers(self) -> int:
        if self._workers is None:
            raise ConfigError(
                "the number of workers is not known", hint="give workers=, or connect through an engine client"
            )
        return self._workers

    @classmethod
    def join(cls, info: Info, here: Worker, within: Deadline) -> ShardedWorker:
        """As `Transport.join`.

        Raises:
            DeadlineError: ranks, which the message names, did not arrive.
        """
        offer = GroupOffer.from_json(info, "the offer of a sharded transport")
        worker = ShardedWorker(offer.member(), here.slices, here.whole)
        worker.enter(here.rank, offer.members, here.params, within)
        return worker

    # an update

    def prepare(self, update: Update, within: Deadline) -> Handoff:
        self._require_driver("send_weights")
        return self._trainer.prepare(update, within)

    def rank_steps(self, source: WeightSource) -> Steps:
        return self._trainer.steps(source)

    def attend(self, within: Deadline) -> ShardedWorker:
        if self._number is None:
            raise TransportError("this is the end of a trainer rank, which sends", expected="a worker: give worker=")
        self._worker.member.group(within)
        return self._worker

    def announce(self, arrival: Arrival, within: Deadline) -> None:
        self._trainer.member.group(within).announce(arrival)

    def check_connection(self) -> bool:
        return self._trainer.member.connected

    def close(self) -> None:
        self._trainer.member.close()

    def _require_driver(self, what: str) -> None:
        if self._number is not None:
            raise TransportError("this is the end of a worker", expected="a trainer rank", state="nothing was sent")
        if not self.ranks.drives:
            raise TransportError(
                f"{what} was called on trainer rank {self.ranks.rank}",
                expected="trainer rank 0; the others call update_weights or send_weights, and follow",
                state="nothing was sent",
            )
