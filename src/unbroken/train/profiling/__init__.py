"""What a training does with its GPUs: activity by counters, time by kinds of kernels, memory by category."""
