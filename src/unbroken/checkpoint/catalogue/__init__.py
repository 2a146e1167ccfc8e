"""What lies in a checkpoints folder or bucket: what counts, what stays, what may be restored, copies of it."""
