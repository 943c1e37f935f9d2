"""Rollouts in TorchRL: a policy that uses remote engines, its settings and records, and limits on their lag."""
