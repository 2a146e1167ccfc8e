"""Loaders that know where they stand."""
