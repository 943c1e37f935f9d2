"""Senders and receivers, where the data layer (transports) and the control layer (engines) meet."""
