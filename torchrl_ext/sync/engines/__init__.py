"""Engines that need no HTTP client: in this process, as Ray actors, and TorchRL's own."""
