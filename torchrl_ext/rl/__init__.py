"""Hydra config groups by transport name; importing this package registers them."""

from torchrl_ext.rl import hydra

__all__ = ["hydra"]
