"""Engines and servers as child processes."""
