"""What a checkpoint is on disk: the arena, tensors and their pieces, values, manifests."""
