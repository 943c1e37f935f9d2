"""The command line: ``torchrl-ext``, one module per command; measurements, and the table that recommends a transport.

Here belongs what a person types and reads. Nothing imports it, so that a trainer never loads it.
"""
