"""What an update will cost, and which road to take."""
