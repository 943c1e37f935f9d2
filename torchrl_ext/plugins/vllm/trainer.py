"""The trainer's end of backend ``torchrl_ext`` for programs that send weights through vLLM's trainer API.

vLLM's `WeightTransferTrainerFactory` (0.31 to 0.33) makes a `TorchRLExtTrainerEngine`, which importing this module
registers. Without vLLM or such a factory, call `TorchRLExtTrainerEngine.trainer_init` with the same arguments.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torchrl_ext.plugins.vllm.register import register_trainers
from torchrl_ext.plugins.vllm.source import VLLMSource
from torchrl_ext.registry import transports
from torchrl_ext.routes import BACKEND
from torchrl_ext.rpc.client import NullEngine
from torchrl_ext.rpc.engine import Engine
from torchrl_ext.rpc.makes.vllm_client import ClientPort
from torchrl_ext.sync.sender import WeightSender
from torchrl_ext.types import Info, SyncReport

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["TorchRLExtTrainerEngine", "TorchRLExtTrainerInitInfo"]


@dataclass
class TorchRLExtTrainerInitInfo:
    """What a trainer rank tells the backend, in the form of vLLM's `TrainerInitInfo`.

    Attributes:
        transport, settings: of `torchrl_ext.make_transport`.
        sender: further arguments of `torchrl_ext.WeightSender`, such as ``dtype`` and ``verify``.
        rank: of this process in the trainer. Rank 0 talks to the servers.
        world_size: 1 + the workers of all servers, if the client gives each server its own ``rank_offset``; None asks
            the workers.
    """

    backend: ClassVar[str] = BACKEND

    transport: str = "delta"
    settings: Info = field(default_factory=dict)
    sender: Info = field(default_factory=dict)
    _: KW_ONLY
    rank: int
    world_size: int | None = None


class TorchRLExtTrainerEngine:
    """Sends the weights of a source by a transport of ours, in the form of vLLM's `TrainerWeightTransferEngine`.

    The caller pauses the servers before `send_weights`, and resumes them and drops their caches after it.

    Attributes:
        is_sender: whether this rank talks to the servers.
        client, source: as given.
        last_report: of the last `send_weights` that succeeded; None before.
    """

    init_info_cls = TorchRLExtTrainerInitInfo
    # what SkyRL's workers ask of every trainer's engine
    skyrl_handles_prefix_cache_reset = False
    skyrl_force_disable_expandable_segments = False
    skyrl_empty_cache_after_send = True

    last_report: SyncReport | None = None

    def __init__(self, client: Any, source: Any, sender: WeightSender, weights: VLLMSource, *, is_sender: bool) -> None:
        self.client, self.source, self.is_sender = client, source, is_sender
        self._sender, self._weights = sender, weights  # the sender's reference is weak

    @classmethod
    def trainer_init(cls, init_info: TorchRLExtTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Return this rank's engine, after rank 0 has asked every worker whether it runs our backend.

        Workers join with the first `send_weights`: they may rehearse an update then, and have to be paused.

        Args:
            client: has the methods of vLLM's ``VLLMWeightSyncClient``; used on rank 0 only.
            source: a ``WeightSource`` of vLLM's, of any release.

        Raises:
            ConfigError: a setting is invalid, or the source cannot give what the transport takes.
            EngineError, DeadlineError: a server does not run our backend, or does not answer.
        """
        transport = transports.make(init_info.transport, **init_info.settings)
        weights = VLLMSource(source, rank=init_info.rank)
        weights.require(gathers=transport.gathers)
        port = ClientPort(client, world_size=init_info.world_size)
        engine = Engine(port) if init_info.rank == 0 else NullEngine()
        engine.info()  # raises now instead of in the first update
        sender = WeightSender(transport, engine, rank=init_info.rank, **init_info.sender)
        sender.register_model(weights)
        return cls(client, source, sender, weights, is_sender=init_info.rank == 0)

    def send_weights(self) -> SyncReport:
        """Send the source's weights as the next version, from every trainer rank; return the report.

        Raises:
            WeightSyncError: as `torchrl_ext.WeightSender.update_weights`. Servers that hold a part of a version refuse
                to resume; the next complete update makes them whole.
        """
        self.last_report = self._sender.update_weights()
        return self.last_report

    def shutdown(self) -> None:
        """Leave the workers and release the transport; may be called twice."""
        self._sender.shutdown()


with suppress(ImportError):
    from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine

    TrainerWeightTransferEngine.register(TorchRLExtTrainerEngine)
    register_trainers()
