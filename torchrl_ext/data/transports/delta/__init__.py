"""Only what changed, as a chain of versions: through shared files or by a broadcast."""
