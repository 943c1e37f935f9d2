"""Sources of weights: all tensors of a trainer, under the names of a checkpoint."""
