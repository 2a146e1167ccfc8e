"""Hierarchical ZeRO: what torch has not, gradients and optimizer state in groups wider than the parameters'."""
