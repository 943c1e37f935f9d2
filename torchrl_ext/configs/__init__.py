"""Configuration by name."""
