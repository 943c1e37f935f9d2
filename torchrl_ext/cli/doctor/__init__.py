"""The command ``torchrl-ext doctor``."""
