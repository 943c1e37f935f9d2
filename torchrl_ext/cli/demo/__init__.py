"""`torchrl-ext demo`."""
