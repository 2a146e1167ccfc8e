"""Before an attempt starts: who supervises, where its checkpoints lie."""
