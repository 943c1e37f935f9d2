"""The weight-transfer backend inside a vLLM worker: a `EngineWorker` behind vLLM's four stages.

Messages come as the ``init_info`` of ``/init_weight_transfer_engine`` and the ``update_info`` of ``/update_weights``;
`Start` has a route of its own, without a body. `Finish` is a message, after which ``/finish_weight_update`` ends vLLM's
part of the update.

How failures and answers travel. vLLM's multi-process executor reads the replies of its workers in order of rank and
raises at the first bad one, without reading the replies behind it (`MultiprocExecutor.collective_rpc`, 0.32): a worker
that raises ahead of others would leave every later call one reply behind. So the workers agree after each step, and
where any of them failed the last one alone raises, in the words of all. The routes hand nothing back but an error's
words, so an answer is raised likewise.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from torchrl_ext.base.errors import EngineError, EngineRefusedError
from torchrl_ext.base.messages import Finish, Join, Reset, Start, read
from torchrl_ext.base.routes import ANSWERS, OPEN_UPDATE, escaped, one_by_one
from torchrl_ext.base.types import Info
from torchrl_ext.engines.loader import EngineLoader
from torchrl_ext.engines.plugin import agree
from torchrl_ext.engines.vllm.model import VLLMModel
from torchrl_ext.sync.engine_worker import EngineWorker, joined, words_of

__all__ = ["TorchRLExtEngine", "agreed", "gather_words"]

log = logging.getLogger("torchrl_ext")


@dataclass
class InitInfo(WeightTransferInitInfo):
    """A message, as the body of ``/init_weight_transfer_engine`` brings it."""

    info: Info = field(default_factory=dict)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """A message, as the body of ``/update_weights`` brings it."""

    info: Info = field(default_factory=dict)


class TorchRLExtEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Hands vLLM's four stages to a `EngineWorker` that loads through layerwise reload."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo

    def __init__(self, config: Any, *where: Any) -> None:
        super().__init__(config, *where)  # vLLM's configuration, the device and the model
        parallel = self.parallel_config
        self._is_last = parallel.rank == parallel.world_size - 1
        self._layers = VLLMModel(self.model, self.vllm_config)
        self._loader = EngineLoader(self._layers)
        self._end = EngineWorker(
            self._loader,
            rank=parallel.data_parallel_index * parallel.world_size + parallel.rank,
            workers=parallel.world_size_across_dp,
            agree=gather_words,
        )
        self._sound = False  # the update was started, and no part of it failed on any worker
        self._open = False  # as the worker around us sees it: it was started and neither failed nor finished here

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        return InitInfo(init_dict)  # read where the workers agree, whatever it is

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        return UpdateInfo(update_dict)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do what a message says that loads nothing: join, prefetch, rehearse, answer."""
        with set_current_vllm_config(self.vllm_config):
            agreed(lambda: one_by_one(init_info.info, lambda: self._name, self._prepare), last=self._is_last)

    def start_weight_update(self) -> None:
        """Begin an update; what an earlier one left behind is cleared first."""
        self._sound = self._open = False
        try:
            self._sound = self._open = agreed(lambda: self._end.handle(Start()), last=self._is_last)
        finally:
            if not self._sound:
                self._layers.roll_back()  # also where it failed on another worker alone

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one handoff, compare digests, or seal."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():  # the base class takes one for granted
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Do the work of `update_weights`, without waiting for the device."""
        sound, self._sound = self._sound, False
        opened, self._open = self._open, self._open and not self._is_last  # the worker around us ends it if we raise
        self._sound = agreed(lambda: self._end.handle(read(update_info.info)), last=self._is_last) and sound
        self._open = opened

    def finish_weight_update(self) -> None:
        """End the update, after a `Finish`; without one it is dropped."""
        self._sound = self._open = False
        if not self._end.receiver.held.intact:
            if missing := self._loader.missing():
                log.error("a weight update ended with %d parameters missing and was dropped", len(missing))
            self._layers.roll_back()
            self._end.receiver.invalidate()

    def invalidate(self, *, whole: bool) -> None:
        """Note that vLLM loaded the model by itself: the next version does not build on what it holds.

        Args:
            whole: it loaded a checkpoint to its end.
        """
        if whole:
            self._end.receiver.handle(Reset(weights="reloaded"))
        else:
            self._end.receiver.invalidate(torn=self._layers.is_open())

    def sleep(self) -> None:
        """Leave the weights alone, whose memory vLLM is about to release."""
        self._end.stop()
        self._layers.asleep = True

    def wake(self) -> None:
        """Note that the memory of the weights is there again."""
        self._layers.asleep = False

    @property
    def whole(self) -> bool:
        """Whether the model holds one version, whole, and may generate."""
        return self._end.receiver.whole

    def shutdown(self) -> None:
        self._end.close()

    @cached_property
    def _name(self) -> str:
        return gather_words(uuid.uuid4().hex)[0]  # the same on all workers

    def _prepare(self, info: Info) -> Info:
        message = read(info)
        match message:
            case Join():
                self._end.together(self._refuse_open)
            case Finish():
                self._end.together(self._refuse_unsound)
        return self._end.handle(message)

    def _refuse_open(self) -> None:
        if self._open:
            raise EngineError(OPEN_UPDATE, hint="end it with POST /finish_weight_update")

    def _refuse_unsound(self) -> None:
        if not self._sound:
            raise EngineRefusedError(
                "no weight update is open, or a part of it failed",
                expected="`Finish` after every load of an update",
                state="the engine stays paused",
            )


def agreed(step: Callable[[], Info | None], *, last: bool) -> bool:
    """Return whether ``step``, in which workers agree, went well on all of them.

    Args:
        last: whether this worker's reply is the last one that vLLM reads.

    Raises:
        EngineError: on the last worker only, when the step failed, or has an answer.
    """
    try:
        answer = step()
    except Exception as error:
        if last:
            raise EngineError(escaped(words_of(error))) from error
        return False
    if answer:
        answers = gather_words(ANSWERS + json.dumps(answer))
        if last:
            raise EngineError(escaped(joined(answers)))
    return True


def gather_words(words: str) -> list[str]:
    """Return the messages of all workers of this engine; ranks lie as `initialize_model_parallel` lays them out."""
    groups = (get_tp_group(), get_pcp_group(), get_pp_group())
    return agree(words, *(group.cpu_group for group in groups if group.world_size > 1))
