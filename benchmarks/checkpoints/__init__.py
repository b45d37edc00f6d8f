"""Checkpoints: the pause that a save makes, its size, and a load, beside torch.save and torch.distributed.checkpoint."""
