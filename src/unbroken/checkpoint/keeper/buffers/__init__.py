"""The snapshots of a node in memory."""
