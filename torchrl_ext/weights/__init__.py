"""Where tensors come from, and how they land."""
