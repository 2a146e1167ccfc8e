"""Tasks checked and prepared before a GPU is taken, and what that read."""
