"""The command ``torchrl-ext demo``."""
