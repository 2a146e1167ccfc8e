"""What the processes of a node share."""
