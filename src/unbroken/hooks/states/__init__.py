"""What frameworks count and keep beside model and optimizer, as values of a checkpoint and back."""
