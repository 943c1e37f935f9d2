"""Requests to engines: generations with the versions that made them."""
