"""What is trained on, and in which order: plain text, token files of other tools, conversations, preferences."""
