"""One engine behind HTTP routes: vLLM, SGLang and the embedded one, and the adapters that they serve."""
