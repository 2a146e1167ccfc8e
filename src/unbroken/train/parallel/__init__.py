"""The trainer of plans: one file for each parallel axis, on torch's own DeviceMesh, DTensor, FSDP2 and pipelining."""
