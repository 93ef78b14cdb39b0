"""Appending to the log, under its lease."""
