"""The keeper: the process on each node that owns the snapshots and outlives the trainer."""
