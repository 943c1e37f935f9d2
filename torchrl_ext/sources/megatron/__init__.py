"""The weights of a Megatron-Core trainer, under the names of their Hugging Face checkpoint."""
