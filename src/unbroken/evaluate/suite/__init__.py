"""A suite: its tasks, their harnesses, their requests on disk."""
