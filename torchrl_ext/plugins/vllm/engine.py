"""The weight-transfer backend inside a vLLM worker: a `WeightReceiver` behind vLLM's four stages.

How failures are told. vLLM's multi-process executor reads the replies of its workers in order of rank and raises at the
first bad one, without reading the replies behind it (`MultiprocExecutor.collective_rpc`, 0.32): a worker that raises
ahead of others would leave every later call one reply behind. So the workers agree after each step, and where any of
them failed the last one alone raises, in the words of all.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, NotConnectedError
from torchrl_ext.plugins.common.workers import agree, joined
from torchrl_ext.plugins.vllm.adapter_check import check_adapter
from torchrl_ext.plugins.vllm.loader import VLLMLoader
from torchrl_ext.sync.inspection import inspect
from torchrl_ext.sync.receiver import WeightReceiver
from torchrl_ext.types import ANSWERS, HOLLOW, OPEN_UPDATE, STILL_STAGING, Info, ParamMeta

__all__ = ["TorchRLExtEngine"]

log = logging.getLogger("torchrl_ext")

_SETTLE_TIMEOUT_S = 600.0


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Whatever the trainer's client says: its shape is the transport's business."""

    info: Info = field(default_factory=dict)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """As `InitInfo`."""

    info: Info = field(default_factory=dict)


class TorchRLExtEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's four stages, handed to a `WeightReceiver` that loads through layerwise reload."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = self.parallel_config
        self._rank, self._workers = parallel.rank, parallel.world_size
        self._first = parallel.data_parallel_index * parallel.world_size
        self._all = parallel.world_size_across_dp
        self._loader = VLLMLoader(model, vllm_config)
        self._receiver = WeightReceiver(self._loader, rank=self._first + self._rank)
        self._staging: Future[None] | None = None
        self._hollow = False  # the weights were given up, and no update has filled them since
        self._sound = False  # the update was started, and no part of it failed on any worker
        self._open = False  # as the worker around us sees it: it was started and neither failed nor finished here

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        return InitInfo(dict(init_dict))

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        return UpdateInfo(dict(update_dict))

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join a transport, prefetch a version from it, rehearse, look at an adapter, forget what the model holds, or
        answer."""
        info = init_info.info
        if "doubt" in info or "reloaded" in info:  # somebody gave the weights up, or loaded others past us
            self._settle()
            self._loader.doubt()
            self._receiver.doubt()
            self._hollow = "hollow" in info
            if "reloaded" in info:
                self._together(self._loader.reloaded)
        elif "hollow" in info:
            self._together(self._refuse_hollow, expected=HOLLOW)
        elif "adapter" in info:
            self._together(lambda: check_adapter(self.model, self.vllm_config, info["adapter"]))
        elif "inspect" in info:
            self._together(lambda: self._tell(inspect(info["inspect"])), expected=ANSWERS)
        elif "rehearse" in info:
            found: Info = {}
            if self._together(lambda: found.update(self._rehearse(info["rehearse"]))):
                self._together(lambda: self._tell(found), expected=ANSWERS)
        elif "prefetch" in info or "prefetched" in info:
            if self._together(lambda: self._stage(info), expected=STILL_STAGING):
                self._together(self._receiver.confirm)
        elif self._together(lambda: self._check(info)):
            self._together(lambda: self._join(info))

    def start_weight_update(self) -> None:
        """Make ready to load; what an earlier update left behind is cleared first."""
        self._sound = False
        try:
            self._sound = self._open = self._together(self._start)
        finally:
            if not self._sound:
                self._loader.roll_back()  # where it went well, while it did not on another worker

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one handoff, compare digests, or seal."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():  # the base class takes one for granted
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """See `update_weights`."""
        sound, self._sound = self._sound, False
        loaded = self._together(lambda: self._receiver.load(update_info.info), on_failure=self._receiver.abort)
        self._sound = sound and loaded

    def finish_weight_update(self) -> None:
        """End the update. It was sealed before, so nothing is left that could fail; or it is abandoned."""
        sound, self._sound, self._open = self._sound, False, False
        missing = self._loader.missing()
        if missing:
            log.error("a weight update was ended with %d parameters missing, and is dropped", len(missing))
        if missing or not sound:
            self._loader.roll_back()
            self._receiver.doubt()
        else:
            self._receiver.finish(self._receiver.version)
            self._hollow = False

    def shutdown(self) -> None:
        self._receiver.abort()
        self._settle()
        self._receiver.close()

    def _tell(self, answer: Info) -> None:
        """Answer in the only way that vLLM's route has. An open update stays as it is."""
        raise EngineError(ANSWERS + json.dumps({"worker": self._first + self._rank, **answer}))

    def _refuse_hollow(self) -> None:
        if self._hollow:
            raise EngineError(HOLLOW)

    def _rehearse(self, question: Info) -> Info:
        """Try the road of an update; every worker for itself, on its own part of the model."""
        self._settle()
        with set_current_vllm_config(self.vllm_config):
            return self._receiver.rehearse(question)

    def _join(self, info: Info) -> None:
        self._receiver.abort()  # whatever an earlier trainer's staging waits for
        self._settle()
        self._receiver.connect(info)

    def _start(self) -> None:
        self._settle()
        self._receiver.start()

    def _stage(self, info: Info) -> None:
        """Prefetch in a thread of its own: this one generates."""
        if "prefetch" in info:
            self._settle()
            self._staging = Future()
            thread = Thread(
                target=_resolve, args=(self._staging, self._receiver.prefetch, info["prefetch"]), daemon=True
            )
            thread.start()
        if self._staging is None:
            raise NotConnectedError("nothing is being staged", hint="ask for a prefetch first")
        if not self._staging.done():
            raise EngineError(STILL_STAGING)
        self._staging.result()

    def _settle(self) -> None:
        """No staging goes on behind this line."""
        if self._staging is not None:
            if not wait([self._staging], _SETTLE_TIMEOUT_S).done:
                raise DeadlineError(f"staging did not end within {_SETTLE_TIMEOUT_S:g} s", hint="restart the engine")
            self._staging = None

    def _check(self, info: Info) -> None:
        """Everything that can be known before a transport is joined, or a weight touched."""
        if self._open:
            raise EngineError(OPEN_UPDATE, hint="end it with POST /finish_weight_update")
        if "transport" not in info or "params" not in info:
            raise ConfigError("the call names no transport and parameters", expected="the info of Transport.open")
        first, size = info.get("rank_offset", 1), info.get("world_size")
        if size is not None and not 1 <= first <= size - self._all:
            raise ConfigError(
                f"this engine's {self._all} workers from rank {first} on do not fit into a world of {size}",
                expected="a world size of 1 (the trainer) + the workers of all engines, as GET /get_world_size counts",
                state="nothing was joined",
            )
        with set_current_vllm_config(self.vllm_config):
            self._loader.check(tuple(ParamMeta.from_json(row) for row in info["params"]))

    def _together(
        self, step: Callable[[], Any], *, on_failure: Callable[[], None] = lambda: None, expected: str | None = None
    ) -> bool:
        """Run ``step`` on every worker of this engine; returns whether it went well on all.

        Raises:
            EngineError: on the last worker only, when it failed on any.
        """
        failure, cause = "", None
        try:
            step()
        except Exception as error:  # whatever it is, the other workers wait to hear of it
            failure, cause = f"{type(error).__name__}: {error}", error
            if expected is None or expected not in failure:
                log.exception("weight update failed on worker %d", self._rank)
            on_failure()
        groups = (get_tp_group(), get_pcp_group(), get_pp_group())  # as `initialize_model_parallel` lays ranks out
        failures = agree(failure, *(group.cpu_group for group in groups if group.world_size > 1))
        if not any(failures):
            return True
        if self._rank == self._workers - 1:
            if expected not in (ANSWERS, HOLLOW):
                self._open = False  # the worker around us ends the update when we raise
            raise EngineError(joined(failures)) from cause
        return False


def _resolve(future: Future[None], call: Callable[[int], None], version: int) -> None:
    try:
        future.set_result(call(version))
    except BaseException as error:  # noqa: BLE001 - carried over to the thread that asks
        future.set_exception(error)
