"""What the supervisor sees: its nodes, the attempt's ranks, the run directory."""
