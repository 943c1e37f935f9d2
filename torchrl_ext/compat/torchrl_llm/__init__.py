"""TorchRL's weight-sync schemes for vLLM and SGLang, under its names and over our transports."""
