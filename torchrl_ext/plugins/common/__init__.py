"""What the plugins of every engine share."""
