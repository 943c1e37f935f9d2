"""A client with the names and shapes of SkyRL's: tokens by way of a router, control calls to every engine itself."""

from torchrl_ext.rollout.remote.client import RemoteInferenceClient
from torchrl_ext.rollout.remote.control import PauseMode

__all__ = ["PauseMode", "RemoteInferenceClient"]
