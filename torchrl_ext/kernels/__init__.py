"""Loops over the bits of tensors, one implementation per kind of device; `torchrl_ext.kernels.base` picks."""
