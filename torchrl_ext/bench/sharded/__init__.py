"""``torchrl-ext bench sharded``, and the processes that it measures."""
