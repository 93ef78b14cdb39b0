"""Loads: planned and recorded, read chunk by chunk, made visible in one commit."""
