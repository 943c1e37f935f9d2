"""Broadcasts to engines that have nothing of ours, on the wires that stock SGLang and vLLM have."""
