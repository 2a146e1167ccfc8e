"""What people and monitors are told of a run: webhooks and metrics."""
