"""One node: its agent, its rank processes, their logs, its keeper's process."""
