"""Maintenance of the log: sealing, merging of seals, trimming and verifying."""
