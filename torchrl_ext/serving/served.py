"""The models that a job rolls out with: each behind a router, with engines that the job owns or that it was given.

Engines that the job owns are watched and started again; others are left alone (slime's and vime's rule for external
engines). Only models that follow the trainer give a client that sends weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
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
    """Holds models by name, behind routers that end with it; a context manager.

    Args:
        supervisor: of the engines that the job owns; it ends with this object. None where others own the engines,
            which live and end by themselves.

    Attributes:
        models: the routing of each model, by name.
        engines: every engine of the job; empty where others own them.
        health: which engines are well.
    """

    def __init__(self, supervisor: Supervisor | None = None) -> None:
        self._supervisor = supervisor
        self.models: dict[str, Routing] = {}
        self.engines: tuple[SupervisedEngine, ...] = () if supervisor is None else supervisor.engines
        self.health = Health() if supervisor is None else supervisor.health

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
        if self._supervisor is not None:
            return tuple(one.url for one in self._supervisor.recover())
        log.warning("external engines are not started again: whoever deployed them does that")
        return ()

    def offload(self) -> None:
        """Put engines that the job owns to sleep at level 1, which keeps weights in host memory; leave others alone.

        A topology gives engines on GPUs ``sleep_mode: true`` among their ``overrides``: without it vLLM only pauses,
        and SGLang refuses. An update wakes them (see `torchrl_ext.rpc.engine.Engine.sleep`).
        """
        self._everywhere(lambda fleet: fleet.sleep(1))

    def onload(self) -> None:
        """Make engines that the job owns take their device memory again; leave others as they are."""
        self._everywhere(lambda fleet: fleet.wake_up())

    def shutdown(self) -> None:
        """End the engines and routers that this object started. May be called twice."""
        for model in self.models.values():  # routers first
            model.close()
        if self._supervisor is not None:
            self._supervisor.stop()

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()

    def _everywhere(self, call: Callable[[Pool], object]) -> None:
        """Call ``call`` with our engines of each model that answer, whether the model follows the trainer or not."""
        for name, model in self.models.items():
            urls = [one.url for one in self.engines if one.plan.model == name]
            if urls:
                try:
                    fleet = connect(*urls, api_key=model.api_key, missing="lose")
                except (EngineUnreachableError, DeadlineError) as error:
                    log.warning("model %s has no engine that answers: %s", name, error)
                else:
                    call(fleet)


def ExternalEngines(*addresses: str, router: str | None = None, **settings: Any) -> Serving:
    """Serve model ``default`` with engines that run already; only a router is started, where none is given.

    Args:
        addresses: ``host:port`` of each engine.
        router: ``host:port`` of a router that runs already.
        settings: for `Routing`.

    Raises:
        ConfigError, EngineError, DeadlineError: as for `Routing.over`.
    """
    serving = Serving()
    serving.models["default"] = Routing.over(*addresses, router=router, health=serving.health, **settings)
    return serving


def OwnedEngines(
    topology: Topology | str | Path,
    *,
    hf_checkpoint: str | Path | None = None,
    launcher: EngineLauncher | None = None,
    router: Mapping[str, Any] | None = None,
    supervisor: Mapping[str, Any] | None = None,
) -> Serving:
    """Start the engines and routers of a topology, and watch them until the `Serving` that is returned ends them.

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
    if not isinstance(topology, Topology):
        topology = Topology.load(topology, hf_checkpoint=hf_checkpoint)
    launcher = launcher or LocalLauncher()
    settings = {"api_key": launcher.api_key, **(router or {})}
    if "router" not in settings:
        settings.setdefault("kind", topology.kind)
    elif len(topology.models) > 1:
        raise ConfigError(
            f"{', '.join(model.name for model in topology.models)} need a router each, and one is given",
            state="nothing was started",
            hint="leave it out",
        )
    plans = [plan for model in topology.models for plan in model.engines]
    serving = Serving(Supervisor(plans, launcher, **(supervisor or {})))
    try:
        for model in topology.models:
            mine = [one for one in serving.engines if one.plan.model == model.name]
            serving.models[model.name] = _routed(model, mine, health=serving.health, **settings)
    except BaseException:
        serving.shutdown()
        raise
    return serving


def _routed(model: ModelPlan, engines: Sequence[SupervisedEngine], **settings: Any) -> Routing:
    """Put the engines of a model behind a router."""
    follows = model.update_weights and bool(engines)
    # a transport is chosen by what an engine can follow; a router has to know where prefill engines are met
    asked = [one.url for one in engines if follows or one.plan.worker_type == "prefill"]
    found = dict(zip(asked, discover(*asked, api_key=settings["api_key"]), strict=True)) if asked else {}
    infos = []
    for one in engines:
        plan = one.plan
        planned = EngineInfo(url=one.url, kind=plan.kind, num_gpus=len(plan.gpus), model=plan.model_path)
        infos.append(replace(found.get(one.url, planned), kind=plan.kind, worker_type=plan.worker_type))
    return Routing(infos, name=model.name, update_weights=follows, **settings)
