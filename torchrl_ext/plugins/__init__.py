"""What runs inside engines of others."""
