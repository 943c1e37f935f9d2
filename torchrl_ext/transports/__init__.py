"""Data layer: move bytes, know nothing of engines."""

from torchrl_ext.transports.base import Transport

__all__ = ["Transport"]
