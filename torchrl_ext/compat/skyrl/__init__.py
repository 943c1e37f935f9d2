"""A client with the names and shapes of SkyRL's: tokens by way of a router, control calls to every engine itself."""

from torchrl_ext.compat.skyrl.client import RemoteInferenceClient
from torchrl_ext.compat.skyrl.control import PauseMode, transport_for

__all__ = ["PauseMode", "RemoteInferenceClient", "transport_for"]
