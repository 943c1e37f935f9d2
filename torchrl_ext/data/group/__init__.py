"""Ranks that meet at the trainer, and form a group in which each can send bytes to each other."""
