"""What counts of the attempts so far, and where it lies."""
