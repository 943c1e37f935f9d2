"""Whatever TorchRL code passes as a model or as an engine, as what a `WeightSender` works with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrl_ext.errors import ConfigError
from torchrl_ext.landing.loader import as_loader
from torchrl_ext.registry import engines, transports
from torchrl_ext.rpc.client import EngineClient
from torchrl_ext.rpc.discovery import connect
from torchrl_ext.rpc.fleet import Fleet
from torchrl_ext.sync.inprocess import InProcessEngine
from torchrl_ext.sync.receiver import WeightReceiver
from torchrl_ext.transports.base import Transport
from torchrl_ext.weights.source import is_torchrl

__all__ = ["as_engine", "as_transport"]


def as_transport(transport: str | Transport, **settings: Any) -> Transport:
    """A transport by name, or the one that is given.

    Raises:
        ConfigError: no such name, settings that it does not take, or settings for one that exists already.
    """
    if isinstance(transport, str):
        return transports.make(transport, **settings)
    if settings:
        raise ConfigError(
            f"settings {sorted(settings)} are for a transport that exists already", hint="give the transport's name"
        )
    return transport


def as_engine(engine: Any, **settings: Any) -> EngineClient | None:
    """An engine client for whatever names one.

    Args:
        engine: None (data layer only); an `EngineClient`, or several; ``"host:port"``, or several; a module, mapping,
            loader or receiver of this process; TorchRL's `AsyncVLLM` (any `RLvLLMEngine`).
        settings: of the clients that are made from addresses.

    Raises:
        ConfigError: nothing knows how to drive it.
        EngineError: nobody answers at an address.
    """
    if engine is None or isinstance(engine, EngineClient):
        return engine
    if isinstance(engine, str):
        return connect(engine, **settings)
    if isinstance(engine, WeightReceiver):
        return InProcessEngine(engine)
    if isinstance(engine, Sequence) and engine and all(isinstance(one, str) for one in engine):
        return connect(*engine, **settings)
    if isinstance(engine, Sequence) and engine:
        return Fleet([client for client in map(as_engine, engine) if client is not None])
    if is_torchrl(engine, "RLvLLMEngine") and "ray" in engines.names():
        return engines.make("ray", engine=engine)
    return InProcessEngine(as_loader(engine))
