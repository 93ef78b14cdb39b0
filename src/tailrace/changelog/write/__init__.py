"""The writer of the log, and its lease."""
