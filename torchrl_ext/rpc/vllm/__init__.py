"""vLLM servers, driven over HTTP."""
