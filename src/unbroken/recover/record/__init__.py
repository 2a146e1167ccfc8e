"""The record of a run (terms, journal, accepted checkpoints), and the places where it may lie."""
