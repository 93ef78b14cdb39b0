"""The capture loop: read, append, record, confirm, in that order."""
