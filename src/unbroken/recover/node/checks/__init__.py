"""What is looked at on the node itself, before something is started there."""
