"""One attempt: its ranks, how far they are, how they end."""
