"""Requests to engines: generations, with the weight versions that sampled each token."""
