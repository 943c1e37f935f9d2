"""Deltas in the files that slime wrote first."""
