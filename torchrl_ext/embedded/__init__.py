"""The embedded engine: a process that hosts a `transformers` causal LM, generates, and follows a trainer.

Its routes are vLLM's (`/inference/v1/generate`, the RL routes of `vllm.entrypoints.rl`), so the same control layer and
the same rollout client drive both. Run it as ``python -m torchrl_ext.embedded --model DIR --port P``, or from
Python with `torchrl_ext.serving.engines.embedded.EmbeddedServer`.
"""
