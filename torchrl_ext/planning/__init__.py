"""What an update will cost, and which route it should take."""
