"""TorchRL's side of rollouts: a policy over engines, its settings and records, and limits to how far they lag behind."""
