"""What runs inside a stock vLLM."""
