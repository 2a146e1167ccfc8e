"""Where readings go: a spool, packed files, Prometheus."""
