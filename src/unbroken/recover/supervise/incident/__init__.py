"""What happened when an attempt ends, and what it is taken for."""
