"""Text without secrets."""
