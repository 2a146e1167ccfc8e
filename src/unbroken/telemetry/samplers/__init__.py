"""What can be read of a node: its GPUs, their links, the host."""
