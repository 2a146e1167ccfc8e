"""What is written out: stores, pseudonyms, and where to."""
