"""Records that prove themselves whole."""
