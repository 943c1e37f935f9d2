"""The embedded engine: a process that hosts a `transformers` causal LM, generates, and follows a trainer.

It serves vLLM's routes (`/inference/v1/generate` and the RL routes of `vllm.entrypoints.rl`), so the same control layer
and rollout client drive both. Run it as ``python -m torchrl_ext.engines.embedded --model DIR --port P``, or from Python
with `torchrl_ext.control.serving.embedded.EmbeddedServer`.
"""
