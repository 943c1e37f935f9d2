"""Measurements, each beside a reference in the same run."""
