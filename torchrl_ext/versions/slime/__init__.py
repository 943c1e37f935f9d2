"""Chains that slime wrote, in either of its formats."""
