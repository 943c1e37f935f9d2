"""The trainer's end of backend ``torchrl_ext`` for programs that send weights through vLLM's trainer API (0.32).

vLLM's `WeightTransferTrainerFactory` makes a `TorchRLExtTrainerEngine`, which importing this module registers. Without
vLLM, call `TorchRLExtTrainerEngine.trainer_init` with the same arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, final

from torch import Tensor

from torchrl_ext.base.errors import ConfigError, DeadlineError, EngineRefusedError, EngineUnreachableError, RouteAbsent
from torchrl_ext.base.messages import Finish, Inspect, Join, Load, Message, Start, Verify
from torchrl_ext.base.registry import transports
from torchrl_ext.base.reports import SyncReport
from torchrl_ext.base.types import EngineInfo, Info, ParamMeta
from torchrl_ext.compat.vllm_words import BACKEND, answers_in, each_answer
from torchrl_ext.control.client import NullEngine
from torchrl_ext.control.engine import Engine
from torchrl_ext.control.http import Answer
from torchrl_ext.control.port import EngineState, Port
from torchrl_ext.data.weights.blocks import Shard
from torchrl_ext.data.weights.source import WeightSource, checked, gathered_in_order, live_shards
from torchrl_ext.engines.vllm.register import register_trainers
from torchrl_ext.sync.sender import WeightSender

__all__ = ["ClientPort", "TorchRLExtTrainerEngine", "TorchRLExtTrainerInitInfo", "VLLMSource"]


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
    def trainer_init(
        cls, init_info: TorchRLExtTrainerInitInfo, *, client: Any, source: Any = None
    ) -> TorchRLExtTrainerEngine:
        """Return this rank's engine, after rank 0 has asked every worker whether it runs our backend.

        Workers join with the first `send_weights`: they may rehearse an update then, and have to be paused.

        Args:
            client: has the methods of vLLM's ``VLLMWeightSyncClient``; used on rank 0 only.
            source: a ``WeightSource`` of vLLM's.

        Raises:
            ConfigError: a setting is invalid, or the object is no source.
            EngineError, DeadlineError: a server does not run our backend, or does not answer.
        """
        transport, is_sender = transports.make(init_info.transport, **init_info.settings), init_info.rank == 0
        weights = VLLMSource(source)
        engine = Engine.of(ClientPort(client, world_size=init_info.world_size)) if is_sender else NullEngine()
        engine.info()  # raises now instead of in the first update
        sender = WeightSender(transport, engine, rank=init_info.rank, **init_info.sender)
        sender.register_model(weights)
        return cls(client, source, sender, weights, is_sender=is_sender)

    def send_weights(self) -> SyncReport:
        """Send the source's weights as the next version, from every trainer rank, and return the report.

        It raises as `torchrl_ext.WeightSender.update_weights`. Servers that hold a part of a version refuse to resume;
        the next complete update makes them whole.
        """
        self.last_report = self._sender.update_weights()
        return self.last_report

    def shutdown(self) -> None:
        """Leave the workers and release the transport; may be called twice."""
        self._sender.shutdown()


@final
class VLLMSource(WeightSource):
    """The weights that a ``WeightSource`` of vLLM's declares and yields; ConfigError if it is no such source."""

    def __init__(self, source: Any) -> None:
        if not callable(getattr(source, "metadata", None)):
            raise ConfigError(f"a {type(source).__name__} declares no weights", expected="a WeightSource of vLLM's")
        self._source = source
        self._params = tuple(ParamMeta(one.name, one.dtype, tuple(one.shape)) for one in source.metadata())
        self._held = getattr(source, "held_names", lambda: None)()  # by this rank; None for all

    def params(self) -> tuple[ParamMeta, ...]:
        return self._params

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what this rank holds."""
        return ((name, tensor.detach()) for name, tensor in self._source if tensor is not None)

    def shards(self) -> Iterator[Shard]:
        """Yield the blocks that this rank holds: of a `ModuleSource` its parameters' own, of others whole tensors."""
        kind = type(self._source)
        if kind.__name__ == "ModuleSource" and kind.__module__.startswith("vllm."):
            named = dict(self._source._module.named_parameters())
            for meta in self._params:
                yield from live_shards(meta.name, named[meta.name])
        else:
            mine = [meta for meta in self._params if self._held is None or meta.name in self._held]
            tensors = (tensor for _, tensor in checked(iter(self), mine))
            yield from gathered_in_order(mine, tensors, "its source makes it as a whole")


@final
class ClientPort(Port):
    """The servers behind a client with the methods of vLLM's ``VLLMWeightSyncClient``, as one engine that stays paused.

    `Load` and `Verify` go through its ``update_weights``, others through ``init_weight_transfer_engine``, whose
    answers are in the words of the client's exception. A client of several servers raises the error of one of them, so
    a message is sent in a `torchrl_ext.base.routes.envelope` until no engine answers.

    Args:
        world_size: as of `TorchRLExtTrainerInitInfo`.
    """

    kind: ClassVar[str] = "vllm"

    def __init__(self, client: Any, *, world_size: int | None = None) -> None:
        self._client, self._size = client, world_size
        self.url = str(getattr(client, "base_url", "") or f"a {type(client).__name__}")

    def describe(self) -> EngineInfo:
        found = self._workers()
        version = max(answer.get("version", 0) for answer in found)
        return EngineInfo(url=self.url, kind=self.kind, world_size=len(found), weight_version=str(version or ""))

    def paused(self) -> bool:
        return True  # the client's owner sees to it, and the protocol has no way to ask

    def state(self) -> EngineState:
        return EngineState(whole=True)

    def pause(self) -> None:
        """Do nothing, as `resume`: the client's owner pauses and resumes the servers."""

    def resume(self) -> None:
        """See `pause`."""

    def call(self, message: Message) -> list[Info]:
        match message:
            case Join():
                self._refuse(message)
                with suppress(EngineRefusedError):  # an earlier trainer may have left an update open
                    self._call(self._client.finish_weight_update)
            case Start():
                return self._call(self._client.start_weight_update)
            case Load() | Verify():
                return self._call(self._client.update_weights, message.to_json())
            case Finish():
                answers, finish = self._ask(message), self._client.finish_weight_update
                labels = "weight_version" in inspect.signature(finish).parameters  # TRL's takes none
                self._call(finish, **({"weight_version": str(message.version)} if labels else {}))
                return answers
        return self._ask(message)

    def _refuse(self, message: Join) -> None:
        """Refuse several deployments that would take the same ranks in one group."""
        if self._size is None and "root" not in message.offer:  # workers that read files have no ranks
            found = self._workers()
            if len(found) > max(answer.get("workers", 1) for answer in found):
                what = f"{self.url} reaches several deployments, whose workers would all join as the same ranks"
                expected = "delta or disk; or a client that gives each server its own rank_offset, and world_size"
                raise ConfigError(what, expected=expected, state="nothing was sent")

    def _workers(self) -> list[Info]:
        if found := [answer for answer in self._ask(Inspect()) if "torchrl_ext" in answer]:
            return found
        expected = "a client that raises errors in the server's words"
        raise EngineRefusedError(f"no worker behind {self.url} answered", expected=expected)

    def _ask(self, message: Message) -> list[Info]:
        return each_answer(partial(self._call, self._client.init_weight_transfer_engine), message, self._size)

    def _call(self, method: Callable[..., Any], *args: Any, **named: Any) -> list[Info]:
        """Call the client; return the answers in its error's words, or raise an error of ours in the worker's words."""
        try:
            method(*args, **named)
        except Exception as error:
            answer, content = _answer_of(error, self.url)
            answers = answers_in(content)
            if not answers:
                raise _restated(error, answer) from error
            return answers
        return []


def _answer_of(error: Exception, where: str) -> tuple[Answer, Any]:
    """Return the server's answer that made a client raise, as far as the client hands it on, and what is in it."""
    response = getattr(error, "response", None)
    text = getattr(response, "text", "") or str(error)
    answer = Answer(where=where, status=getattr(response, "status_code", 500), text=text)
    body = replace(answer, text=text[max(text.find('{"'), 0) :])  # some clients put it behind words of their own
    with suppress(ValueError):
        content = body.json()
        if isinstance(content, dict) and content.keys() & {"error", "detail", "message"}:
            return body, content
    return answer, text


def _restated(error: Exception, answer: Answer) -> Exception:
    names, words = " ".join(base.__name__ for base in type(error).__mro__), answer.message().replace("\\/", "/")
    what = f"{answer.where}: {words}"
    reason: dict[str, Any] = {"status": answer.status, "reason": words}
    if getattr(error, "response", None) is None:
        if "Timeout" in names:
            return DeadlineError(what, state="the server may still be working on the call")
        if isinstance(error, OSError) or "Connect" in names or "ActorDied" in names:
            return EngineUnreachableError(what, hint="check that the server runs, and the client's address")
    if answer.absent:
        hint = (
            "start the server with VLLM_SERVER_DEV_MODE=1 in its environment; vLLM has these routes only in that mode"
        )
        return RouteAbsent(what, expected="vLLM's RL routes", hint=hint, **reason)
    if "not configured" in words or "Invalid init_info" in words:
        hint = (
            f'install torchrl_ext beside vLLM and start it with --weight-transfer-config \'{{"backend": "{BACKEND}"}}\''
        )
        return EngineRefusedError(what, expected=f"weight-transfer backend {BACKEND!r}", hint=hint, **reason)
    return EngineRefusedError(what, **reason)


with suppress(ImportError):
    from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine

    TrainerWeightTransferEngine.register(TorchRLExtTrainerEngine)
    register_trainers()
