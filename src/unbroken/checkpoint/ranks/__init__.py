"""The ranks of a run: which one this process is, and how they agree."""
