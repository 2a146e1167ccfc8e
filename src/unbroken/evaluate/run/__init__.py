"""An evaluation from start to end."""
