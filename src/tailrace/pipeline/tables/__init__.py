"""Managed tables: the state of each, and whether it can resume."""
