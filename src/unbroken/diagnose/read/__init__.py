"""Logs as lines: files, encodings, prefixes, times, tracebacks, dumps."""
