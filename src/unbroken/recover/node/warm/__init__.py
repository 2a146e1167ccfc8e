"""Processes that have imported what the next attempt of a script will import, and wait to become its ranks."""
