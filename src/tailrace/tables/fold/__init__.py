"""Reduce changes to rows: the last state per key, or every version."""
