"""Workflows that other systems document for their users, on real engines."""
