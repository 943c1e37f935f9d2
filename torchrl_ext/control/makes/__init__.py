"""Clients of engines behind HTTP: vLLM, SGLang, and the embedded engine."""
