"""Consistent points: versions of lake tables that belong together."""
