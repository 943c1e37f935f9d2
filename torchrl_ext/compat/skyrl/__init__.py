"""A client with the names and shapes of SkyRL's: token requests through a router, control calls to every engine."""

from torchrl_ext.compat.skyrl.client import RemoteInferenceClient
from torchrl_ext.compat.skyrl.control import PauseMode

__all__ = ["PauseMode", "RemoteInferenceClient"]
