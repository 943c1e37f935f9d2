"""Control layer: tell engines what to do and when."""
