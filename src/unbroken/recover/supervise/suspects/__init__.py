"""Nodes of which one is at fault, and it is not certain which: they leave at once, are tested aside, and return by themselves."""
