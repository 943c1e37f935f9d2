"""Senders and receivers, which connect the data layer (transports) with the control layer (engines)."""
