"""A stock vLLM, a stock SGLang and the embedded engine as child processes: the command line and environment of each."""
