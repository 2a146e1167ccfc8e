"""What of the snapshots is written, committed and sent on."""
