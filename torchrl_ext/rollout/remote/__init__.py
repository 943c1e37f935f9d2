"""A client with the names and shapes of SkyRL's: tokens by way of a router, control calls to every engine itself."""

from torchrl_ext.rollout.remote.client import RemoteInferenceClient
from torchrl_ext.rollout.remote.control import PauseMode
from torchrl_ext.rollout.remote.updates import transport_for

__all__ = ["PauseMode", "RemoteInferenceClient", "transport_for"]
