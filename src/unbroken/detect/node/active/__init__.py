"""Checks that make a device work: exact products, patterns in memory, bandwidths, the disk. Need torch; see docs/check.md."""
