"""Serve a job's models, each behind a router, with engines that the job owns or external ones.

Owned engines are watched and restarted; external ones are left alone.
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
from torchrl_ext.serving.launchers import LocalLauncher
from torchrl_ext.serving.routing import Routing
from torchrl_ext.serving.supervisor import SupervisedEngine, Supervisor
from torchrl_ext.serving.topology import ModelPlan, Topology
from torchrl_ext.types import EngineInfo

__all__ = ["ExternalEngines", "OwnedEngines", "Serving"]

log = logging.getLogger("torchrl_ext")


class Serving:
    """Holds a job's models by name, each behind a router; a context manager that ends its routers and engines.

    Args:
        supervisor: the supervisor of owned engines, which `shutdown` ends; None for external engines.

    Attributes:
        models: the routing of each model, by name.
        engines: the owned engines; empty for external ones.
        health: records which engines are well.
    """

    def __init__(self, supervisor: Supervisor | None = None) -> None:
        self._supervisor = supervisor
        self.models: dict[str, Routing] = {}
        self.engines: tuple[SupervisedEngine, ...] = () if supervisor is None else supervisor.engines
        self.health = Health() if supervisor is None else supervisor.health

    def model(self, name: str) -> Routing:
        """Return the routing of the model called ``name``.

        Raises:
            ConfigError: there is no such model; the message lists the names.
        """
        if name not in self.models:
            raise ConfigError(f"there is no model called {name!r}", expected=f"one of {', '.join(self.models)}")
        return self.models[name]

    def updatable(self) -> dict[str, Routing]:
        """Return the routings of models that follow the trainer, by name."""
        return {name: model for name, model in self.models.items() if model.update_weights}

    def recover(self) -> tuple[str, ...]:
        """Restart lost owned engines and return their addresses; with external engines, only log a warning."""
        if self._supervisor is not None:
            return tuple(one.url for one in self._supervisor.recover())
        log.warning("this library does not restart external engines; their owner does")
        return ()

    def offload(self) -> None:
        """Put owned engines to sleep at level 1, which keeps weights in host memory; leave external ones alone.

        Engines on GPUs need ``sleep_mode: true`` among their topology's ``overrides``: without it vLLM only pauses and
        SGLang refuses. An update wakes them (see `torchrl_ext.rpc.engine.Engine.sleep`).
        """
        self._everywhere(lambda fleet: fleet.sleep(1))

    def onload(self) -> None:
        """Wake owned engines, which take their device memory again; leave external ones alone."""
        self._everywhere(lambda fleet: fleet.wake_up())

    def shutdown(self) -> None:
        """End our routers and engines. May be called twice."""
        for model in self.models.values():  # routers first
            model.close()
        if self._supervisor is not None:
            self._supervisor.stop()

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()

    def _everywhere(self, call: Callable[[Pool], object]) -> None:
        """Call ``call`` with a pool of each model's owned engines that answer."""
        for name, model in self.models.items():
            urls = [one.url for one in self.engines if one.plan.model == name]
            if urls:
                try:
                    fleet = connect(*urls, api_key=model.api_key, missing="lose")
                except (EngineUnreachableError, DeadlineError) as error:
                    log.warning("no engine of model %s answers: %s", name, error)
                else:
                    call(fleet)


def ExternalEngines(*addresses: str, router: str | None = None, **settings: Any) -> Serving:
    """Serve the model ``default`` with running engines; start a router unless one is given.

    Args:
        addresses: ``host:port`` of each engine.
        router: ``host:port`` of a running router.
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
    launcher: LocalLauncher | None = None,
    router: Mapping[str, Any] | None = None,
    supervisor: Mapping[str, Any] | None = None,
) -> Serving:
    """Start a topology's engines and routers, and watch the engines until the returned `Serving` ends them.

    A lost engine gets no requests. After its restart, an engine of a frozen model gets them at once; an engine of a
    model that follows the trainer, when a report shows that it has the newest weights (`Routing.follow`).

    Args:
        topology: a topology, or the path of its YAML file (then with ``hf_checkpoint``).
        hf_checkpoint: see `Topology.parse`.
        launcher: starts the engines; None uses a `LocalLauncher` without settings.
        router: settings of each `RouterProcess`, such as ``make``, and ``api_key`` if engines require a key other than
            the launcher's; or ``{"router": address}`` of a running router, for a topology of one model.
        supervisor: settings of the `Supervisor`, such as ``interval_s``.

    Raises:
        ConfigError, EngineError, DeadlineError: something could not be started; everything else was ended.
    """
    if not isinstance(topology, Topology):
        topology = Topology.load(topology, hf_checkpoint=hf_checkpoint)
    launcher = launcher or LocalLauncher()
    settings = {"api_key": launcher.api_key, **(router or {})}
    if "router" not in settings:
        settings.setdefault("kind", topology.kind)
    elif len(topology.models) > 1:
        raise ConfigError(
            f"{', '.join(model.name for model in topology.models)} each need a router, but only one is given",
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
    # the choice of a transport needs the engines' capabilities; a router needs the prefill engines' bootstrap ports
    asked = [one.url for one in engines if follows or one.plan.worker_type == "prefill"]
    found = dict(zip(asked, discover(*asked, api_key=settings["api_key"]), strict=True)) if asked else {}
    infos = []
    for one in engines:
        plan = one.plan
        planned = EngineInfo(url=one.url, kind=plan.kind, num_gpus=len(plan.gpus), model=plan.model_path)
        infos.append(replace(found.get(one.url, planned), kind=plan.kind, worker_type=plan.worker_type))
    return Routing(infos, name=model.name, update_weights=follows, **settings)
