"""The ranks of a node: their processes, how they are started, why the kernel ended one."""
