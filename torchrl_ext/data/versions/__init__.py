"""Full checkpoints and chains of versions as files: written, read, followed."""
