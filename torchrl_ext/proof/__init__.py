"""What shows that an engine computes with what it was sent."""
