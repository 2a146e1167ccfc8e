"""Saving: when a save is due, how it goes, and what becomes of it."""
