"""The supervisor of a run."""
