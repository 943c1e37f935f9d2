"""Routes of slime and vime."""
