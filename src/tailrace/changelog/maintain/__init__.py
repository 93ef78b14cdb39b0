"""Sealing, trimming and verifying the log."""
