"""Engines that need no HTTP client: in this process, as Ray actors, and those that TorchRL itself drives."""
