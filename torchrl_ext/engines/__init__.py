"""Plugins that run inside stock vLLM and SGLang, and land a trainer's weights there."""
