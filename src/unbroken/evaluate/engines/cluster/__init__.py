"""Workers on the nodes of a cluster: `engine` starts a process on each, `node`, which starts the workers there."""
