"""Records that prove themselves whole, and the plain form of dataclasses in them."""
