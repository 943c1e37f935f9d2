"""The weight-transfer backend inside a vLLM worker: a `WorkerEnd` behind vLLM's four stages.

Messages come as the ``init_info`` of ``/init_weight_transfer_engine`` and the ``update_info`` of ``/update_weights``;
`Start` and `Finish` have routes of their own, without a body.

How failures and answers travel. vLLM's multi-process executor reads the replies of its workers in order of rank and
raises at the first bad one, without reading the replies behind it (`MultiprocExecutor.collective_rpc`, 0.32): a worker
that raises ahead of others would leave every later call one reply behind. So the workers agree after each step, and
where any of them failed the last one alone raises, in the words of all. The routes hand nothing back but an error's
words, so an answer is raised likewise.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from torchrl_ext.errors import ConfigError, EngineError
from torchrl_ext.messages import CheckAdapter, Finish, Join, Message, Reset, Start, read, stamped
from torchrl_ext.plugins.adapters import check_adapter, refuse_layers
from torchrl_ext.plugins.found import started_with
from torchrl_ext.plugins.loader import EngineLoader
from torchrl_ext.plugins.vllm.model import VLLMModel
from torchrl_ext.plugins.workers import agree
from torchrl_ext.routes import ANSWERS, OPEN_UPDATE, escaped
from torchrl_ext.sync.worker_end import WorkerEnd, joined, words_of
from torchrl_ext.types import Info

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
    """Hands vLLM's four stages to a `WorkerEnd` that loads through layerwise reload."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, *where: Any, base: str | None = None) -> None:
        super().__init__(config, *where)  # vLLM's configuration, the device and the model
        vllm_config, parallel = self.vllm_config, self.parallel_config
        self._is_last = parallel.rank == parallel.world_size - 1
        self._layers = VLLMModel(self.model, vllm_config)
        self._loader = EngineLoader(self._layers)
        self._end = WorkerEnd(
            self._loader,
            rank=parallel.data_parallel_index * parallel.world_size + parallel.rank,
            workers=parallel.world_size_across_dp,
            agree=gather_words,
            base=base or started_with(self.model, vllm_config.model_config),
        )
        self._sound = False  # the update was started, and no part of it failed on any worker
        self._open = False  # as the worker around us sees it: it was started and neither failed nor finished here

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        return InitInfo(init_dict)  # read where the workers agree, whatever it is

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        return UpdateInfo(update_dict)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do what a message says that loads nothing: join, prefetch, rehearse, check an adapter, answer."""
        with set_current_vllm_config(self.vllm_config):
            agreed(lambda: self._prepare(init_info.info), last=self._is_last)

    def start_weight_update(self) -> None:
        """Begin an update; what an earlier one left behind is cleared first."""
        self._sound = self._open = False
        try:
            self._sound = self._open = agreed(lambda: self._end.handle(self._own(Start())), last=self._is_last)
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
        """End the update. It was sealed before, so nothing is left that could fail; an incomplete one is dropped."""
        sound, self._sound, self._open = self._sound, False, False
        missing = self._loader.missing()
        if missing:
            log.error("a weight update ended with %d parameters missing and was dropped", len(missing))
        if missing or not sound:
            self._layers.roll_back()
            self._end.receiver.invalidate()
        else:
            agreed(lambda: self._end.handle(self._own(Finish(version=self._end.receiver.version))), last=self._is_last)

    def invalidate(self, *, whole: bool) -> None:
        """Note that vLLM loaded the model by itself: the next version does not build on what it holds.

        Args:
            whole: it loaded a checkpoint to its end.
        """
        if whole:
            self._end.receiver.handle(Reset(weights="reloaded"))
        else:
            self._end.receiver.invalidate(torn=self._layers.is_open())

    @property
    def whole(self) -> bool:
        """Whether the model holds one version, whole, and may generate."""
        return self._end.receiver.whole

    def _own(self, message: Message) -> Message:
        """Return the message of a route that has no body; what came before it bore the connection."""
        return stamped(message, self._end.receiver.connection)

    def shutdown(self) -> None:
        self._end.close()

    def _prepare(self, told: Info) -> Info:
        message = read(told)
        if isinstance(message, CheckAdapter):
            self._end.together(lambda: _check_layers(self.model, self.vllm_config, message))
            return {}
        if isinstance(message, Join):
            self._end.together(self._refuse_second)
        return self._end.handle(message)

    def _refuse_second(self) -> None:
        if self._open:
            raise EngineError(OPEN_UPDATE, hint="end it with POST /finish_weight_update")


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


def _check_layers(model: Any, vllm_config: Any, message: CheckAdapter) -> None:
    """Refuse, on a worker, an adapter with a layer that has no LoRA there.

    vLLM itself refuses a layer by the last part of its name only, and passes over any other that it does not find:
    such an adapter would be served without a part of it.

    Raises:
        ConfigError, StoreError: see `check_adapter` and `refuse_layers`.
    """
    manager: Any = getattr(model, "lora_manager", None)
    most = None if manager is None else manager.lora_config.max_lora_rank
    check_adapter(message, enabled=manager is not None, max_rank=most)
    if vllm_config.parallel_config.pipeline_parallel_size == 1:
        wrapped = {*manager.modules, *(part for parts in manager.packed_modules.values() for part in parts)}
        known = {name.rpartition(".")[2] for name in wrapped}
        refuse_layers(_layers_of(model, message), wrapped.__contains__, known)


def _layers_of(model: Any, message: CheckAdapter) -> Iterator[str]:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    renames: Callable[[str], str] | None = None if mapper is None else mapper.get_rename_mapper()
    from vllm.lora.utils import parse_fine_tuned_lora_name  # here, as other releases may lack it

    for meta in message.params:
        try:
            yield parse_fine_tuned_lora_name(meta.name, renames)[0]
        except ValueError as error:
            raise ConfigError(f"vLLM cannot load {meta.name}: {error}", expected="plain LoRA tensors") from None
