"""What is shown to people: text of others made harmless, charts."""
