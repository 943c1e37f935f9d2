"""The models that a job rolls out with: each behind a router, with engines that the job owns or that it was given.

Engines that the job owns are watched and started again; others are left alone (slime's and vime's rule for external
engines). Only models that follow the trainer give a client that sends weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torchrl_ext.errors import ConfigError, DeadlineError, EngineUnreachableError
from torchrl_ext.rpc.discovery import connect, discover
from torchrl_ext.rpc.health import Health
from torchrl_ext.rpc.pool import Pool
from torchrl_ext.serving.launchers import EngineLauncher, LocalLauncher
from torchrl_ext.serving.routing import Routing
from torchrl_ext.serving.supervisor import SupervisedEngine, Supervisor
from torchrl_ext.serving.topology import ModelPlan, Topology
from torchrl_ext.types import EngineInfo

__all__ = ["ExternalEngines", "OwnedEngines", "Serving"]

log = logging.getLogger("torchrl_ext")


class Serving:
    """Holds models by name, behind routers that end with it; a context manager. Its engines live and end by themselves.

    Attributes:
        models: the routing of each model, by name.
    """

    def __init__(self) -> None:
        self._models: dict[str, Routing] = {}
        self.models: Mapping[str, Routing] = MappingProxyType(self._models)

    def model(self, name: str) -> Routing:
        """Return the model called ``name``.

        Raises:
            ConfigError: there is none; the message lists the names.
        """
        if name not in self.models:
            raise ConfigError(f"there is no model called {name!r}", expected=f"one of {', '.join(self.models)}")
        return self.models[name]

    def updatable(self) -> dict[str, Routing]:
        """Return the models that follow the trainer, by name."""
        return {name: model for name, model in self.models.items() if model.update_weights}

    def recover(self) -> tuple[str, ...]:
        """Start lost engines that the job owns again, and return their addresses; of others, log a warning only."""
        log.warning("external engines are not started again: whoever deployed them does that")
        return ()

    def offload(self) -> None:
        """Make engines that the job owns give their device memory back, for the trainer; leave others as they are."""

    def onload(self) -> None:
        """Make engines that the job owns take their device memory again."""

    def shutdown(self) -> None:
        """End the engines and routers that this object started. May be called twice."""
        for model in self._models.values():
            model.close()

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()


class ExternalEngines(Serving):
    """Serves model ``default`` with engines that run already; only a router is started, where none is given.

    Args:
        addresses: ``host:port`` of each engine.
        router: ``host:port`` of a router that runs already.
        settings: for `Routing`.

    Raises:
        ConfigError, EngineError, DeadlineError: as for `Routing.over`.
    """

    def __init__(self, *addresses: str, router: str | None = None, **settings: Any) -> None:
        super().__init__()
        self._models["default"] = Routing.over(*addresses, router=router, **settings)


class OwnedEngines(Serving):
    """Starts the engines and routers of a topology, watches them, and ends them.

    An engine that is lost gets no more requests. One of a frozen model gets them again as soon as it is up; one of a
    model that follows the trainer, when a report shows it with the newest weights (`Routing.follow`).

    Args:
        topology: what to start, or the path of its YAML (then with ``hf_checkpoint``).
        hf_checkpoint: see `Topology.parse`.
        launcher: how engines are started; None for processes on this machine.
        router: settings of each `RouterProcess`, such as ``make``, and ``api_key`` where engines ask for another than
            the launcher's; or ``{"router": address}`` of one that runs already, for a topology of one model.
        supervisor: settings of the `Supervisor`, such as ``interval_s``.

    Raises:
        ConfigError, EngineError, DeadlineError: something could not be started; the rest was ended again.
    """

    def __init__(
        self,
        topology: Topology | str | Path,
        *,
        hf_checkpoint: str | Path | None = None,
        launcher: EngineLauncher | None = None,
        router: Mapping[str, Any] | None = None,
        supervisor: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(topology, Topology):
            topology = Topology.load(topology, hf_checkpoint=hf_checkpoint)
        launcher, self.health = launcher or LocalLauncher(), Health()
        settings = {"api_key": launcher.api_key, "health": self.health, **(router or {})}
        if "router" not in settings:
            settings.setdefault("kind", topology.kind)
        elif len(topology.models) > 1:
            raise ConfigError(
                f"{', '.join(model.name for model in topology.models)} need a router each, and one is given",
                state="nothing was started",
                hint="leave it out",
            )
        plans = [plan for model in topology.models for plan in model.engines]
        self._supervisor = Supervisor(plans, launcher, self.health, **(supervisor or {}))
        try:
            for model in topology.models:
                self._models[model.name] = self._routed(model, settings)
        except BaseException:
            self.shutdown()
            raise

    @property
    def engines(self) -> tuple[SupervisedEngine, ...]:
        """Every engine of the job."""
        return self._supervisor.engines

    def recover(self) -> tuple[str, ...]:
        return tuple(one.url for one in self._supervisor.recover())

    def offload(self) -> None:
        """Put engines to sleep at level 1, which keeps weights in host memory.

        A topology gives engines on GPUs ``sleep_mode: true`` among their ``overrides``: without it vLLM only pauses,
        and SGLang refuses. An update wakes them (see `torchrl_ext.rpc.engines.sleep`).
        """
        self._everywhere(lambda fleet: fleet.sleep(1))

    def onload(self) -> None:
        self._everywhere(lambda fleet: fleet.wake_up())

    def shutdown(self) -> None:
        super().shutdown()  # routers first
        self._supervisor.stop()

    def _routed(self, model: ModelPlan, settings: dict[str, Any]) -> Routing:
        planned = [
            EngineInfo(
                url=one.url,
                kind=one.plan.kind,
                worker_type=one.plan.worker_type,
                num_gpus=len(one.plan.gpus),
                model=one.plan.model_path,
            )
            for one in self.engines
            if one.plan.model == model.name
        ]
        follows = model.update_weights and bool(planned)
        # a transport is chosen by what an engine can follow; a router has to know where prefill engines are met
        asked = [info.url for info in planned if follows or info.worker_type == "prefill"]
        found = dict(zip(asked, discover(*asked, api_key=settings["api_key"]), strict=True)) if asked else {}
        infos = [replace(found.get(info.url, info), kind=info.kind, worker_type=info.worker_type) for info in planned]
        return Routing(infos, name=model.name, update_weights=follows, **settings)

    def _everywhere(self, call: Callable[[Pool], object]) -> None:
        """Call ``call`` with the engines of each model that answer, whether the model follows the trainer or not."""
        for model in self._models.values():
            if model.engines:
                urls = [info.url for info in model.engines]
                try:
                    fleet = connect(*urls, api_key=model.api_key, missing="lose")
                except (EngineUnreachableError, DeadlineError) as error:
                    log.warning("model %s has no engine that answers: %s", model.name, error)
                else:
                    call(fleet)
