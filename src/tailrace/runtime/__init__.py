"""The capture loop as a library: read, append, record, confirm, in that order."""
