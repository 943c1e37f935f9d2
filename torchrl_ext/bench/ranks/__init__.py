"""Measurements of trainers of several ranks, each a process of its own."""
