"""TorchRL's own names of schemes for vLLM and SGLang, over our transports."""
