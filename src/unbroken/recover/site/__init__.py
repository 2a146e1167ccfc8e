"""What a site remembers of its nodes over all runs."""
