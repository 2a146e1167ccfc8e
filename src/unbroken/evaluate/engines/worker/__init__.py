"""A worker: its process, the blocks that it answers, its model, what it makes ready."""
