"""Hooks: each trainer killed in the middle, and its own resume beside ours."""
