"""JSON over HTTP: sessions with a deadline over every call."""
