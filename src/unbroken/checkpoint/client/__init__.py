"""The keeper as ranks and agents see it: found, asked, its buffers filled."""
