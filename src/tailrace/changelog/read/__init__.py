"""Readers of the log: commits, indexes, offsets, and the consumers it keeps rows for."""
