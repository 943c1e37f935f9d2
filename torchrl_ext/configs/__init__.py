"""Hydra groups by transport name; importing this package adds those of `torchrl_ext.configs.hydra`."""

from torchrl_ext.configs import hydra

__all__ = ["hydra"]
