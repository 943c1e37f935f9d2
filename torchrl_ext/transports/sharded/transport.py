"""`ShardedTransport` sends each worker the slices that it needs, from the trainer ranks that hold them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchrl_ext.errors import ConfigError, TransportError
from torchrl_ext.transports.group.backends import choose_backend
from torchrl_ext.transports.group.meeting import LOBBY
from torchrl_ext.transports.sharded.agents import load_nixl
from torchrl_ext.transports.sharded.ends import End, Settings
from torchrl_ext.transports.sharded.trainer import TrainerEnd
from torchrl_ext.transports.sharded.worker import WorkerEnd
from torchrl_ext.transports.standalone import StandaloneTransport
from torchrl_ext.types import Handoff, Info, ParamMeta
from torchrl_ext.weights.shards.blocks import Block
from torchrl_ext.weights.source import WeightSource

__all__ = ["ShardedTransport"]

BUCKET_BYTES = 8 << 20
"""Default bound on what a trainer rank sends, and a worker receives, in one round, in bytes; two are in flight."""


class ShardedTransport(StandaloneTransport):
    """Sends each worker its slices, straight from the trainer ranks that hold them: no gather, no full tensor.

    Every rank of the trainer (of torch's process group; or one process without any) makes one, and calls
    `update_weights` or `send_weights`. Ranks say which blocks they hold (`WeightSource.shards`), workers which ones
    they need, and all make the same transfer plan of it, whose digest is compared before a byte moves.

    Args:
        master_address: where workers and other trainer ranks reach trainer rank 0.
        master_port: of its store; 0 picks a free one (with a control layer, which passes it on).
        worker: without a control layer, the number of this worker, 0 to ``workers - 1``; None for a trainer rank.
        workers: without a control layer, how many workers there are.
        device: where tensors travel from and to; by default the current CUDA device, or the CPU without one.
        carrier: ``"group"`` sends point to point over NCCL or gloo; ``"nixl"`` lets workers read from registered memory
            of the trainer (``pip install torchrl_ext[nixl]``).
        backend: of carrier ``"group"``: ``"nccl"`` or ``"gloo"``; by default nccl on CUDA and gloo on the CPU.
        bucket_bytes: what a trainer rank sends, and a worker receives, in one round, at most; two are in flight.
        secret: as in `VLLMCollectiveTransport`.
        timeout_s: deadline of every wait, in seconds.

    Raises:
        ConfigError: settings that cannot work.

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
    proves: ClassVar[bool] = True
    slices: ClassVar[bool] = True

    def __init__(
        self,
        master_address: str = "127.0.0.1",
        master_port: int = 0,
        worker: int | None = None,
        workers: int | None = None,
        device: torch.device | str | int | None = None,
        *,
        carrier: str = "group",
        backend: str | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        secret: str = "",
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        if carrier not in ("group", "nixl"):
            raise ConfigError(f"there is no carrier {carrier!r}", expected="'group' or 'nixl'")
        if bucket_bytes < 1 or not timeout_s > 0 or not 0 <= int(master_port) < 1 << 16:
            raise ConfigError(
                f"bucket_bytes={bucket_bytes}, timeout_s={timeout_s}, master_port={master_port}",
                expected="1 or more; more than 0; 0 to 65535",
            )
        if worker is not None and not 0 <= worker < (worker + 1 if workers is None else workers):
            raise ConfigError(f"worker {worker} does not exist among {workers}", expected="0 to workers - 1")
        if carrier == "nixl" and backend is not None:
            raise ConfigError(f"carrier 'nixl' takes no backend {backend!r}", hint="leave it out")
        known: tuple[str, ...] = ("gloo", "nccl")
        if carrier == "nixl":
            load_nixl()  # what is not installed is said at once
            backend, known = carrier, (carrier,)
        chosen, made = choose_backend(device, backend, known)
        self.settings = Settings(
            carrier=carrier,
            device=chosen,
            backend=made,
            bucket_bytes=bucket_bytes,
            timeout_s=timeout_s,
        )
        self._workers = workers
        meets = (self.settings, master_address, int(master_port), secret)
        self._trainer_end = TrainerEnd(*meets, self.name) if worker is None else None
        self._worker_end = None if worker is None else WorkerEnd(*meets, worker)

    @classmethod
    def from_info(cls, info: Info) -> ShardedTransport:
        try:
            return cls(
                info["master_address"],
                info["master_port"],
                worker=0,  # its rank comes when it joins
                device="cpu" if info["backend"] == "gloo" else None,
                carrier=info["carrier"],
                backend=None if info["carrier"] == "nixl" else info["backend"],
                secret=info["secret"],
                bucket_bytes=info["bucket_bytes"],
                timeout_s=info["timeout_s"],
            )
        except TypeError as error:
            raise TransportError(f"the trainer's offer cannot be read: {error}", state="nothing was joined") from error

    # forming the group

    def init_all_workers_group(self, model_metadata: Mapping[str, tuple[Any, Any]]) -> None:
        """Form the group without a control layer; every trainer rank and every worker calls this at the same time.

        Args:
            model_metadata: ``{name: (dtype, shape)}``, the same everywhere; empty to agree on nothing.

        Raises:
            DeadlineError: names the ranks that did not arrive within `timeout_s`.
            ManifestError: names the parameter on which ranks disagree.
        """
        params = tuple(ParamMeta(name, dtype, tuple(shape)) for name, (dtype, shape) in model_metadata.items())
        if self._worker_end is not None:
            self._worker_end.enter(LOBBY, None, None, params)
        elif self._trainer.ranks.rank:
            self._trainer.meet()
        else:
            try:
                self._trainer.member.stop.clear()
                self._trainer.host(LOBBY, self._standalone_workers(), params)
            except BaseException as error:
                self._trainer.ranks.dismiss(error)
                raise
            self._trainer.ranks.dismiss()

    def open(self, workers: int, params: tuple[ParamMeta, ...]) -> Handoff:
        """As `Transport.open`; 0 workers (no control layer) stands for those that call `init_all_workers_group`.

        Raises:
            TransportError: this is not trainer rank 0, or the port is taken.
        """
        driver = self._driver("open")
        driver.member.stop.clear()
        room = f"room/{uuid.uuid4().hex}"
        if workers == 0:
            if self.check_connection():
                return Handoff(info={"transport": self.name})
            room, workers = LOBBY, self._standalone_workers()
        notes, settings = driver.member.notes(room), self.settings
        info = {
            "transport": self.name,
            "master_address": notes.host,
            "master_port": notes.port,
            "secret": notes.secret,
            "room": room,
            "members": workers + driver.ranks.size,
            "carrier": settings.carrier,
            "backend": settings.backend,
            "bucket_bytes": settings.bucket_bytes,
            "timeout_s": self.timeout_s,
        }
        return Handoff(info=info, transfer=partial(driver.host, room, workers, params))

    def _standalone_workers(self) -> int:
        if self._workers is None:
            raise ConfigError(
                "the number of workers is not known", hint="give workers=, or connect through an engine client"
            )
        return self._workers

    # trainer ranks

    def prepare(self, source: WeightSource, version: int) -> Handoff:
        self.stats.bytes = 0  # until something is sent; listing the shards has counted the whole model
        info, send = self._driver("send_weights").prepare(source, version)

        def transfer() -> None:
            self.stats = send()

        return Handoff(info=info, transfer=transfer)

    @property
    def drives(self) -> bool:
        return self._trainer.ranks.rank == 0

    def follow(self, source: WeightSource) -> None:
        self._trainer.follow(source)

    def dismiss(self, source: WeightSource | None, error: BaseException | None = None) -> None:
        self._trainer.ranks.dismiss(error)

    def announce(self, info: Info) -> None:
        self._trainer.member.announcements().put(info)

    # workers

    def want(self, slices: Mapping[str, tuple[Block, ...]], whole: Mapping[str, str]) -> None:
        self._worker.slices, self._worker.whole = slices, whole

    def join(self, info: Info) -> None:
        """As `Transport.join`; ``info["rank"]`` is this worker's rank, 1 or more.

        Raises:
            DeadlineError: names the ranks that did not arrive.
        """
        params = tuple(ParamMeta.from_json(row) for row in info.get("params", ()))
        self._worker.enter(info["room"], info["rank"], info["members"], params)

    def receive(self, info: Info, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        pairs = self._worker.receive(info, into)
        next(pairs)  # from here on the handoff is taken or refused, also by a loader that asks for nothing
        return pairs

    def decline(self, info: Info, error: BaseException) -> None:
        self._worker.decline(info, error)

    def poll(self, timeout_s: float) -> Info | None:
        return self._worker.member.announcements().get(timeout_s)

    # both ends

    def abort(self) -> None:
        self._end.member.abort()

    def check_connection(self) -> bool:
        return self._end.member.connected

    def shutdown(self) -> None:
        self._end.member.close()

    @property
    def _end(self) -> End:
        return self._trainer if self._worker_end is None else self._worker_end

    @property
    def _trainer(self) -> TrainerEnd:
        if self._trainer_end is None:
            raise TransportError("this is the end of a worker", expected="a trainer rank", state="nothing was sent")
        return self._trainer_end

    @property
    def _worker(self) -> WorkerEnd:
        if self._worker_end is None:
            raise TransportError("this is the end of a trainer rank, which sends", expected="a worker: give worker=")
        return self._worker_end

    def _driver(self, what: str) -> TrainerEnd:
        rank = self._trainer.ranks.rank
        if rank:
            raise TransportError(
                f"{what} was called on trainer rank {rank}",
                expected="trainer rank 0, which drives; the others call update_weights or send_weights, and follow",
                state="nothing was sent",
            )
        return self._trainer
