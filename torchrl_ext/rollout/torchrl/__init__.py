"""TorchRL's side of rollouts: a policy over engines, its settings and records, and limits of how far they lag."""
