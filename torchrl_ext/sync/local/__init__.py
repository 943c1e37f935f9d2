"""Engines without an HTTP client: in this process, in Ray actors, and TorchRL's own."""
