"""Deltas by shard: what each trainer rank keeps and writes, and how a reader takes only what it needs."""
