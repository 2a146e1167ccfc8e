"""Events as a verdict: which came first, where it sits, what it means."""
