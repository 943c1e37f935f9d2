"""Adapters to the options, names and routes of other systems; the core imports none of them."""
