"""What a node's processes print: where it lies, and how it comes to the supervisor."""
