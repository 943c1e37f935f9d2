"""`torchrl-ext doctor`."""
