"""Other people's checkpoints in, ours out."""
