"""Clients of engines behind HTTP: vLLM, SGLang, the embedded engine, and their LoRA adapters."""
