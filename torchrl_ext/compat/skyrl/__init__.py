"""A client with the names and shapes of SkyRL's: tokens by way of a router, control calls to every engine itself."""

from torchrl_ext.compat.skyrl.client import RemoteInferenceClient
from torchrl_ext.compat.skyrl.control import PauseMode
from torchrl_ext.compat.skyrl.updates import transport_for

__all__ = ["PauseMode", "RemoteInferenceClient", "transport_for"]
