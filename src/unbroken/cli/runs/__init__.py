"""Commands about runs: start one, look at it, see what it survives."""
