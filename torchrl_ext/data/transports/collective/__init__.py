"""Broadcasts from the trainer to every worker, over NCCL or gloo."""
