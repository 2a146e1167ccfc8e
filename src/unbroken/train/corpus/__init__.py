"""What is trained on beside plain text: token files of other tools, conversations, preferences."""
