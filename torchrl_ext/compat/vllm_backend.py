"""The worker's end of backend ``torchrl_ext`` below vLLM's trainer API (0.32): hands vLLM's four stages to our worker.

The stages return nothing but errors, so every worker raises the answers of all (`torchrl_ext.compat.vllm_words`).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from torchrl_ext.base.errors import EngineError
from torchrl_ext.base.messages import Start, read
from torchrl_ext.base.types import Info
from torchrl_ext.compat.vllm_words import one_by_one, spoken
from torchrl_ext.engines.vllm.worker import VLLMWorker, gather_words

__all__ = ["TorchRLExtEngine"]


@dataclass
class _Init(WeightTransferInitInfo):
    info: Info = field(default_factory=dict)


@dataclass
class _Update(WeightTransferUpdateInfo):
    info: Info = field(default_factory=dict)


@final
class TorchRLExtEngine(WeightTransferEngine[_Init, _Update]):
    """vLLM's four stages; `torchrl_ext.engines.vllm.register.Beside` fills in ``ours`` when the first one comes."""

    init_info_cls, update_info_cls = _Init, _Update
    ours: VLLMWorker

    def parse_init_info(self, init_dict: dict[str, Any]) -> _Init:
        return _Init(init_dict)  # read where workers answer, whatever it is

    def parse_update_info(self, update_dict: dict[str, Any]) -> _Update:
        return _Update(update_dict)

    def init_transfer_engine(self, init_info: _Init) -> None:
        self._say(lambda: one_by_one(init_info.info, lambda: self._name, lambda info: self.ours.handle(read(info))))

    def start_weight_update(self) -> None:
        self._say(lambda: self.ours.handle(Start()))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._say(lambda: self.ours.handle(read(update_info)))

    def receive_weights(self, update_info: _Update) -> None:
        self.update_weights(update_info.info)

    def finish_weight_update(self) -> None:
        """Do nothing: a `Finish` came before, or the next `Start` clears what there is."""

    def shutdown(self) -> None:
        """Do nothing: the worker leaves by messages."""

    @cached_property
    def _name(self) -> str:
        return gather_words(uuid.uuid4().hex)[0]  # the same on all workers

    def _say(self, step: Callable[[], Info]) -> None:
        """Raise the answers of all workers, if there are any, or the error on which they agree, on every worker."""
        try:
            answer = step()
        except Exception as error:
            raise EngineError(str(error).replace("/", "\\/")) from error
        if answer:
            raise EngineError("; ".join(gather_words(spoken(answer))))
