"""What several tests and benchmarks share, and no user needs."""
