"""What is seen of a running attempt, and what ends it."""
