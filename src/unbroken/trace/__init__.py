"""What happened on a cluster: one schema, readers, statistics, figures, a report, synthetic traces."""
