"""Arrays to bytes and back: what changed in a tensor, coded near its entropy, and the loops that find and write it."""
