"""Requests to engines, for generations with the weight versions that sampled them, and routers in front of engines."""
