"""Before an attempt runs: who supervises, what goes on, on which nodes."""
