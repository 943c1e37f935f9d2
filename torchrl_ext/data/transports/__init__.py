"""Transports: how the bytes of a version travel from a trainer to the workers of engines."""
