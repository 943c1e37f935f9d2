"""The plugin that runs inside a stock vLLM."""
