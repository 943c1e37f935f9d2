"""Clients of one engine behind HTTP routes: of vLLM, SGLang and the embedded engine, and of their LoRA adapters."""
