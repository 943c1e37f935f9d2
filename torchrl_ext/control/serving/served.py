"""Serve a job's models, each behind a router, with engines that the job starts or external ones."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torchrl_ext.base.deadline import in_thread
from torchrl_ext.base.errors import ConfigError
from torchrl_ext.base.types import EngineInfo
from torchrl_ext.control.discovery import discover
from torchrl_ext.control.serving.launchers import LocalLauncher
from torchrl_ext.control.serving.processes import GuardedProcess
from torchrl_ext.control.serving.routing import Routing
from torchrl_ext.control.serving.topology import EnginePlan, ModelPlan, Topology

__all__ = ["ExternalEngines", "OwnedEngines", "Serving"]


class Serving:
    """Holds a job's models by name, each behind a router; a context manager that ends its routers and engines.

    Args:
        engines: the processes of owned engines, by the names of their plans; `shutdown` ends them.

    Attributes:
        models: the routing of each model, by name.
    """

    def __init__(self, engines: Mapping[str, GuardedProcess] | None = None) -> None:
        self.engines = dict(engines or {})
        self.models: dict[str, Routing] = {}

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

    def shutdown(self) -> None:
        """End our routers and engines. May be called twice."""
        for model in self.models.values():  # routers first
            model.close()
        ends = [in_thread(engine.stop, f"stop {name}") for name, engine in self.engines.items()]
        for end in ends:
            end.result()

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()


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
    serving.models["default"] = Routing.over(*addresses, router=router, **settings)
    return serving


def OwnedEngines(
    topology: Topology | str | Path,
    *,
    hf_checkpoint: str | Path | None = None,
    launcher: LocalLauncher | None = None,
    router: Mapping[str, Any] | None = None,
) -> Serving:
    """Start a topology's engines and routers, which the returned `Serving` ends.

    Args:
        topology: a topology, or the path of its YAML file (then with ``hf_checkpoint``).
        hf_checkpoint: see `Topology.parse`.
        launcher: starts the engines; None uses a `LocalLauncher` without settings.
        router: settings of each `RouterProcess`, such as ``make``, and ``api_key`` if engines require a key other than
            the launcher's; or ``{"router": address}`` of a running router, for a topology of one model.

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
    serving = Serving(_started([plan for model in topology.models for plan in model.engines], launcher))
    try:
        for model in topology.models:
            serving.models[model.name] = _routed(model, serving.engines, **settings)
    except BaseException:
        serving.shutdown()
        raise
    return serving


def _started(plans: Sequence[EnginePlan], launcher: LocalLauncher) -> dict[str, GuardedProcess]:
    """Start engines at the same time; the first failure cancels the other starts, and ends what has started."""
    over = threading.Event()
    starts = {
        plan.name: in_thread(partial(launcher.launch, plan, cancel=over), f"launch {plan.name}") for plan in plans
    }
    try:
        for start in as_completed(starts.values()):
            start.result()
    except BaseException:
        over.set()
        for start in starts.values():
            with suppress(Exception):  # it did not start
                start.result().stop()
        raise
    return {name: start.result() for name, start in starts.items()}


def _routed(model: ModelPlan, processes: Mapping[str, GuardedProcess], **settings: Any) -> Routing:
    """Put the engines of a model behind a router."""
    urls = {plan.name: processes[plan.name].url for plan in model.engines}
    # the choice of a transport needs the engines' capabilities; a router needs the prefill engines' bootstrap ports
    asked = [urls[plan.name] for plan in model.engines if model.update_weights or plan.worker_type == "prefill"]
    found = dict(zip(asked, discover(*asked, api_key=settings["api_key"]), strict=True)) if asked else {}
    infos = []
    for plan in model.engines:
        url = urls[plan.name]
        planned = EngineInfo(url=url, kind=plan.kind, num_gpus=len(plan.gpus), model=plan.model_path)
        infos.append(replace(found.get(url, planned), kind=plan.kind, worker_type=plan.worker_type))
    return Routing(infos, name=model.name, update_weights=model.update_weights and bool(infos), **settings)
