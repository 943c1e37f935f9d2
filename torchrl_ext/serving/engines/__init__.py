"""Command lines and environments of vLLM, SGLang and embedded servers and their routers."""
