"""Where a model comes from, and its one copy in a node's memory."""
