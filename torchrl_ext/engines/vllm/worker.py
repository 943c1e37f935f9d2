"""One worker of a vLLM: a `EngineWorker` whose messages come, and are answered, as JSON.

vLLM's own collective call reaches every worker at the same point of its loop, in the thread that generates, and returns
what each says (`torchrl_ext.engines.vllm.register`). vLLM's executor reads the replies in order of rank, so no worker
raises: an error is an answer, too, on which the workers agree. Beside what a `EngineWorker` does, a worker does here

=================  ==============================================================================================
`State`            adds ``{"asleep": [tags]}``
`Join`             first puts live tensors back into layers that a failed update left in checkpoint form
`Start`            refuses while an update by vLLM's own weight transfer is open
`Finish`           has vLLM forget adapters that it placed over the old weights
`Commit`           is refused, and `Poll` says why, where the engine has to be paused for a version
=================  ==============================================================================================
"""

from __future__ import annotations

from typing import Any, final

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group
from vllm.envs import VLLM_USE_RAY_V2_EXECUTOR_BACKEND

from torchrl_ext.base.errors import EngineRefusedError
from torchrl_ext.base.messages import Commit, Finish, Join, Load, Message, Reset, Start, State, Undo, Verify
from torchrl_ext.base.types import Info
from torchrl_ext.engines.loader import EngineLoader
from torchrl_ext.engines.plugin import agree
from torchrl_ext.engines.vllm.model import VLLMModel
from torchrl_ext.sync.engine_worker import EngineWorker

__all__ = ["VLLMWorker", "gather_words"]

_OPEN = "an update by vLLM's own weight transfer is open"


@final
class VLLMWorker:
    """Keeps one worker's model up to date.

    Args:
        worker: vLLM's worker, whose model is loaded.

    Attributes:
        end: handles messages, and knows what the model holds.
        asleep: the tags whose memory vLLM has released.
    """

    def __init__(self, worker: Any) -> None:
        parallel = worker.vllm_config.parallel_config
        self._worker, self._config = worker, worker.vllm_config
        self._layers = VLLMModel(worker.model_runner.get_model(), self._config)
        self.end = EngineWorker(
            EngineLoader(self._layers),
            rank=parallel.data_parallel_index * parallel.world_size + parallel.rank,
            workers=parallel.world_size_across_dp,
            agree=gather_words,
            obstacle=self._obstacle,
        )
        self.asleep: frozenset[str] = frozenset()

    def handle(self, message: Message) -> Info:
        """Do what a message says, and return the answer; raises as `EngineWorker.handle`."""
        with set_current_vllm_config(self._config):
            return self._answer(message)

    def _answer(self, message: Message) -> Info:
        match message:
            case State():
                return {"asleep": sorted(self.asleep), **self.end.handle(message)}
            case Join():
                self._layers.roll_back()
            case Start():
                self.end.receiver.refuse_replaced(message)
                self.end.together(self._refuse_others)
        answer = self.end.handle(message)
        if isinstance(message, (Commit, Undo, Load, Verify, Finish)) and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        if isinstance(message, Finish):
            self._worker.model_runner.reset_lora_state()
        return answer

    def loaded(self, *, whole: bool) -> None:
        """Note that vLLM loaded the model by itself, so the next version does not build on it.

        Args:
            whole: it loaded all of it, to the end.
        """
        if whole:
            self.end.receiver.handle(Reset(weights="reloaded"))
        else:
            self.end.receiver.invalidate(torn=self._layers.is_open())

    def sleeps(self, tags: frozenset[str], *, dropped: bool) -> None:
        """Note that vLLM is about to release memory, and let go of it; or that it has it again.

        Args:
            tags: all that sleep from now on.
            dropped: the weights among them are lost.
        """
        if "weights" in tags - self.asleep:
            self.end.stop()
        self.asleep, self._layers.asleep = tags, "weights" in tags
        if dropped:
            self.end.receiver.invalidate(empty=True)

    def may_resume(self) -> bool:
        """Return whether the model holds one version, whole; a version that was only started is given up then."""
        if self.end.receiver.whole:
            self.end.receiver.give_up()
        return self.end.receiver.whole

    def _obstacle(self) -> str:
        """Return why the engine has to be paused for a version; "" if it may land between two steps."""
        config, parallel = self._config, self._config.parallel_config
        backend = parallel.distributed_executor_backend
        one_queue = ("uni", "mp", *(["ray"] if VLLM_USE_RAY_V2_EXECUTOR_BACKEND else []))
        obstacles = {
            _OPEN: self._is_updating(),
            f"{', '.join(sorted(self.asleep))} asleep": bool(self.asleep),
            f"steps and calls may reach the workers of executor {backend} in another order": backend not in one_queue,
            "replicas share experts, and each takes a version at a step of its own": (
                parallel.data_parallel_size > 1 and config.model_config.is_moe
            ),
            "a KV connector keeps keys and values elsewhere": config.kv_transfer_config is not None,
            "embeddings of images are kept": config.model_config.multimodal_config is not None,
            "adapters are placed over the weights": config.lora_config is not None,
            "vLLM's fault tolerance may drop dispatched batches": parallel.enable_fault_tolerance,
        }
        return next((why for why, holds in obstacles.items() if holds), "")

    def _is_updating(self) -> bool:
        return getattr(self._worker, "_weight_update_active", False)

    def _refuse_others(self) -> None:
        if self._is_updating():
            raise EngineRefusedError(
                _OPEN,
                state="nothing was changed",
                hint="end it with POST /finish_weight_update",
            )


def gather_words(words: str) -> list[str]:
    """Return the messages of all workers of this engine; ranks lie as `initialize_model_parallel` lays them out."""
    groups = (get_tp_group(), get_pcp_group(), get_pp_group())
    return agree(words, *(group.cpu_group for group in groups if group.world_size > 1))
