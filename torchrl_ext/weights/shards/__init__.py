"""The parts of tensors that the ranks of a sharded trainer hold, without a gather."""
