"""Full checkpoints and chains of versions as files: stores, manifests, written, read, followed."""
